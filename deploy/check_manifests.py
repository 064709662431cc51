"""The part of check.py that is about manifests: the Kubernetes schemas, what points at what, and
whether chart and kustomize base say the same."""

import re

import jsonschema
import kubernetes_validate
import yaml

from check_common import HERE, RENDERED, ROOT, check, done, seconds

# The oldest with native sidecars, and the newest whose schemas there are.
KUBERNETES = ["1.29", "1.37"]


def documents(path):
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def name_of(resource):
    return f"{resource['kind']}/{resource['metadata']['name']}"


# Custom resources have no schema in any package: this much of them is checked.
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
CUSTOM = {
    "Certificate": {
        "apiVersion": "cert-manager.io/v1",
        "type": "object",
        "required": ["secretName", "usages", "issuerRef"],
        "additionalProperties": False,
        "properties": {
            **{k: {"type": "string"} for k in ("secretName", "commonName")},
            **{k: {"type": "string", "pattern": "^[0-9]+h$"} for k in ("duration", "renewBefore")},
            "privateKey": STRINGS,
            "issuerRef": STRINGS,
            **{k: {"type": "array", "minItems": 1, "items": {"type": "string"}} for k in ("usages", "dnsNames")},
        },
        "anyOf": [{"required": ["commonName"]}, {"required": ["dnsNames"]}],
    },
    "ServiceMonitor": {
        "apiVersion": "monitoring.coreos.com/v1",
        "type": "object",
        "required": ["selector", "endpoints"],
        "additionalProperties": False,
        "properties": {
            "selector": {"type": "object", "required": ["matchLabels"]},
            "endpoints": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["port"],
                    "additionalProperties": False,
                    "properties": {k: {"type": "string"} for k in ("port", "path", "interval")},
                },
            },
        },
    },
    "PrometheusRule": {
        "apiVersion": "monitoring.coreos.com/v1",
        "type": "object",
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {
            "groups": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["name", "rules"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string"},
                        "rules": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["alert", "expr", "labels", "annotations"],
                                "additionalProperties": False,
                                "properties": {
                                    "alert": {"type": "string"},
                                    "expr": {"type": "string"},
                                    "for": {"type": "string"},
                                    "labels": STRINGS,
                                    "annotations": STRINGS,
                                },
                            },
                        },
                    },
                },
            }
        },
    },
}


def validate(origin, resource):
    what = f"{origin}: {name_of(resource)}"
    own = CUSTOM.get(resource["kind"])
    if own:
        check(what, resource["apiVersion"] == own["apiVersion"], f"apiVersion {resource['apiVersion']}")
        for error in jsonschema.Draft202012Validator(own).iter_errors(resource["spec"]):
            check(what, False, f"{error.json_path}: {error.message}")
        return
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            check(what, False, f"Kubernetes {version}: {error.message}")


def selected(selector, labels):
    return selector.items() <= (labels or {}).items()


def check_server(origin, resources):
    """The server's Deployment, against what points at it and what the server is."""
    of_kind = {kind: [r for r in resources if r["kind"] == kind] for kind in {r["kind"] for r in resources}}
    for server in of_kind.get("Deployment", []) + of_kind.get("Job", []):
        pod = server["spec"]["template"]["spec"]
        labels = server["spec"]["template"]["metadata"]["labels"]
        what = f"{origin}: {name_of(server)}"
        for container in pod["containers"] + pod.get("initContainers", []):
            locked = container["securityContext"]
            check(what, locked["readOnlyRootFilesystem"] and not locked["allowPrivilegeEscalation"]
                  and locked["capabilities"]["drop"] == ["ALL"], f"{container['name']} is not locked down")
            check(what, "memory" in container["resources"]["limits"], f"{container['name']} has no memory limit")
            check_files(what, container, {v["name"] for v in pod.get("volumes", [])})
        check(what, pod["securityContext"]["runAsNonRoot"]
              and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", "pod securityContext")
        check(what, pod["automountServiceAccountToken"] is False, "mounts a token of the service account")
        check(what, pod["enableServiceLinks"] is False, "service links set FENCEPOST_PORT and the like")
        if pod["containers"][0]["name"] != "fencepostd":
            continue
        container = pod["containers"][0]
        environment = by_name(container)
        for variable in ("FENCEPOST_LISTEN", "FENCEPOST_HTTP_LISTEN", "FENCEPOST_HEALTH_LISTEN"):
            port = environment.get(variable, "nothing").removeprefix("0.0.0.0:")
            check(what, port.isdigit() and int(port) in [p["containerPort"] for p in container["ports"]],
                  f"{variable} is {environment.get(variable)}")
        for probe, service in {"startupProbe": "liveness", "livenessProbe": "liveness",
                               "readinessProbe": "fencepost.v1.LockService"}.items():
            check(what, container[probe]["grpc"] == {"port": 50053, "service": service}, probe)
        check(what, environment["FENCEPOST_HEALTH_LISTEN"].endswith(":50053"), "probes ask another port")
        files = [path for variable, path in environment.items() if variable.startswith("FENCEPOST_TLS_")]
        plain = environment["FENCEPOST_ALLOW_PLAINTEXT"] == "true"
        check(what, plain == (not files), "neither TLS nor plaintext, or both")
        drain = seconds(environment["FENCEPOST_DRAIN_TIMEOUT"])
        check(what, pod["terminationGracePeriodSeconds"] >= drain + 5, "terminationGracePeriodSeconds below the drain")
        check(what, "FENCEPOST_DATABASE_URL_FILE" in environment, "no URL file")
        ports = {p["name"] for p in container["ports"]}
        for service in of_kind["Service"]:
            check(f"{origin}: {name_of(service)}", selected(service["spec"]["selector"], labels), "selects no pod")
            check(f"{origin}: {name_of(service)}", {p["targetPort"] for p in service["spec"]["ports"]} <= ports)
            grpc = [p.get("appProtocol") for p in service["spec"]["ports"] if p["targetPort"] == "grpc"]
            check(f"{origin}: {name_of(service)}", grpc == ["kubernetes.io/h2c" if plain else None],
                  f"appProtocol is {grpc}, {'without' if plain else 'with'} TLS")
        for kind, path in {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}.items():
            for resource in of_kind[kind]:
                check(f"{origin}: {name_of(resource)}", selected(resource["spec"][path]["matchLabels"], labels),
                      "selects no pod")
        if collector := environment.get("FENCEPOST_OTLP_ENDPOINT"):
            out = {port["port"] for policy in of_kind["NetworkPolicy"]
                   for rule in policy["spec"]["egress"] for port in rule["ports"]}
            check(what, int(collector.rpartition(":")[2]) in out, f"no network policy lets traces out to {collector}")
        for monitor in of_kind.get("ServiceMonitor", []):
            services = [s for s in of_kind["Service"]
                        if selected(monitor["spec"]["selector"]["matchLabels"], s["metadata"]["labels"])]
            check(f"{origin}: {name_of(monitor)}", len(services) == 1, f"selects {len(services)} services")
            check(f"{origin}: {name_of(monitor)}", all(
                endpoint["port"] in [p["name"] for p in service["spec"]["ports"]]
                for service in services for endpoint in monitor["spec"]["endpoints"]), "a port that is not there")


def check_clients(origin, resources):
    """Whoever has an endpoint is let in by the network policy, and connects as the server serves."""
    pods = [(name_of(r), r["spec"]["template"]) for r in resources if r["kind"] == "Deployment"]
    servers = [pod["spec"] for name, pod in pods if name == "Deployment/fencepost"]
    certificates = {r["spec"]["secretName"]: r["spec"] for r in resources if r["kind"] == "Certificate"}
    let_in = [rule["from"][0]["podSelector"]["matchLabels"] for r in resources if r["kind"] == "NetworkPolicy"
              for rule in r["spec"]["ingress"] if "podSelector" in rule["from"][0]]
    clients = [(name, pod, container) for name, pod in pods
               for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
               if "FENCEPOST_ENDPOINT" in by_name(container)]
    for name, pod, container in clients:
        what = f"{origin}: {name}"
        check(what, any(selected(labels, pod["metadata"]["labels"]) for labels in let_in), "no network policy lets it in")
        says = by_name(container)
        scheme, host = re.match(r"(https?)://([^:]+)", says["FENCEPOST_ENDPOINT"]).groups()
        check(what, f"Service/{host}" in map(name_of, resources), f"there is no Service {host}")
        shown = secret_of(pod["spec"], container, says.get("FENCEPOST_TLS_CERT"))
        for server in servers:
            serves = by_name(server["containers"][0])
            served = secret_of(server, server["containers"][0], serves.get("FENCEPOST_TLS_CERT"))
            check(what, scheme == ("https" if served else "http"), f"{scheme} to a server whose certificate is {served}")
            if served:
                check(what, host in certificates[served]["dnsNames"], f"the server's certificate is not for {host}")
                check(what, "server auth" in certificates[served]["usages"], f"{served} is no server's")
                check(what, shown in certificates and "client auth" in certificates[shown]["usages"], "no certificate")
                check(what, {"FENCEPOST_TLS_CA", "FENCEPOST_TLS_KEY"} <= says.keys(), "no authority, or no key")
    return len(clients)


def secret_of(pod, container, path):
    """The Secret that a file is of."""
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod.get("volumes", []) if "secret" in v}
    return next((secrets[m["name"]] for m in container["volumeMounts"]
                 if path and path.startswith(m["mountPath"] + "/")), None)


def check_snippets():
    for path in (ROOT / "README.md", HERE / "README.md"):
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.M | re.S):
            check(path.relative_to(ROOT), "FENCEPOST_ENDPOINT" not in block or 'fencepost-client: "true"' in block,
                  "a client's pod has no label that the network policy lets in")


def by_name(container):
    return {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}


def check_files(what, container, volumes):
    """What is mounted is there, and every file that a variable names is on it."""
    mounts = container.get("volumeMounts", [])
    for mount in mounts:
        check(what, mount["name"] in volumes, f"{container['name']} mounts no volume {mount['name']}")
    paths = tuple(mount["mountPath"] + "/" for mount in mounts)
    for variable, value in by_name(container).items():
        check(what, not value.startswith("/") or value.startswith(paths),
              f"{container['name']}: {variable} is {value}, on no volume")


def check_env(resources):
    """What the chart's env says is in server and migration, letter for letter."""
    values = yaml.safe_load((HERE / "helm/all.yaml").read_text())["env"]
    wanted = {name: value if isinstance(value, str) else str(value).lower() for name, value in values.items()}
    check("helm/all.yaml has no large number and no fraction", {"1000000", "0.1"} <= set(wanted.values()))
    for pod in (r["spec"]["template"]["spec"] for r in resources if r["kind"] == "Deployment"):
        for container in pod["containers"] + pod["initContainers"]:
            got = by_name(container)
            for name in wanted:
                check(f"helm-all: {container['name']}", got.get(name) == wanted[name],
                      f"{name} is {got.get(name)}, not {wanted[name]}")
    done("the chart's env comes as it is written")


def of_the_database():
    """The settings that `fencepostd migrate` heeds: those of flags that every command takes."""
    flags = re.findall(r"#\[arg\((.*?)\)\]\s*pub", (ROOT / "server/src/args.rs").read_text(), re.S)
    names = {re.search(r'env = "(\w+)"', flag)[1] for flag in flags if re.search(r"\bglobal = true\b", flag)}
    check("flags of every command are not found", {"FENCEPOST_PGBOUNCER", "FENCEPOST_DATABASE_URL_FILE"} <= names)
    return names


def check_migration(origin, resources, settings):
    """What the server is told of the database, its migration is told."""
    for server in (r for r in resources if r["kind"] == "Deployment"):
        pod = server["spec"]["template"]["spec"]
        for migrate in pod.get("initContainers", []):
            if migrate["name"] != "migrate":
                continue
            said, serves = by_name(migrate), by_name(pod["containers"][0])
            for name in settings & (said.keys() | serves.keys()):
                check(f"{origin}: {name_of(server)}", said.get(name) == serves.get(name),
                      f"{name} is {said.get(name)} for the migration, {serves.get(name)} for the server")


def check_manifests():
    rendered = {path.stem: documents(path) for path in sorted(RENDERED.glob("*.yaml"))
                if path.stem.startswith(("kustomize-", "helm-"))}
    own = set()
    # Not part of an overlay.
    rendered["advance-tokens"] = documents(HERE / "kubernetes/example/advance-tokens.yaml")
    for origin, resources in rendered.items():
        check(origin, resources, "is empty")
        for resource in resources:
            validate(origin, resource)
            own |= {resource["kind"]} & CUSTOM.keys()
    done(f"{sum(map(len, rendered.values()))} manifests, by the strict schemas of Kubernetes {' and '.join(KUBERNETES)}")
    print(f"deploy-check: no schema of custom resources is to be had: of {', '.join(sorted(own))} the structure"
          " alone is checked, by our own")

    for origin, resources in rendered.items():
        check_server(origin, resources)
    done("pods are locked down; probes, ports and selectors meet")

    counted = {origin: check_clients(origin, resources) for origin, resources in rendered.items()}
    check("no client is rendered, with TLS and without", counted["kustomize-example"] and counted["kustomize-example-tls"])
    check_snippets()
    done("clients are let in, and speak TLS where the server does")

    for server in (r for r in rendered["helm-openshift"] if r["kind"] == "Deployment"):
        pod = server["spec"]["template"]["spec"]
        named = {key for of in [pod, *pod["containers"], *pod["initContainers"]] for key in of["securityContext"]
                 if key in ("runAsUser", "runAsGroup", "fsGroup")}
        check(f"helm-openshift: {name_of(server)}", not named, f"names {', '.join(sorted(named))}")
    done("OpenShift chooses the user")

    for resource in rendered["helm-all"]:
        for group in resource["spec"]["groups"] if resource["kind"] == "PrometheusRule" else []:
            for rule in group["rules"]:
                url = rule["annotations"]["runbook_url"]
                check(rule["alert"], url.startswith("https://git.example/locks/deploy/README.md#"), f"the chart says {url}")
    done("the chart puts prometheusRule.runbookPrefix into every alert")

    check_env(rendered["helm-all"])

    settings = of_the_database()
    for origin, resources in rendered.items():
        check_migration(origin, resources, settings)
    pairs = [by_name(c) for r in rendered["helm-all"] if r["kind"] == "Deployment"
             for c in r["spec"]["template"]["spec"].get("initContainers", [])]
    check("helm-all: no migration behind PgBouncer is rendered", any("FENCEPOST_PGBOUNCER" in p for p in pairs))
    done("server and migration are told the same of the database")

    base = {name_of(r): r for r in rendered["kustomize-base"]}
    chart = {name_of(r): r for r in rendered["helm-default"]}
    check("chart and kustomize base", base.keys() == chart.keys(), f"{base.keys() ^ chart.keys()}")
    for name in base.keys() & chart.keys():
        check(f"chart and kustomize base differ in {name}", base[name].get("spec") == chart[name].get("spec"))
    done("the chart with its defaults is the kustomize base")
