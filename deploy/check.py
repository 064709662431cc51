"""What check.sh cannot ask a program for: the Kubernetes schemas, and whether the files agree with
each other and with the server's flags, metrics and runbook.

    check.py DIRECTORY      DIRECTORY has what kustomize and helm have rendered
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent
RENDERED = Path(sys.argv[1])
# The oldest with native sidecars, and the newest whose schemas there are.
KUBERNETES = ["1.29", "1.37"]

failures = []


def check(what, ok, detail=""):
    if not ok:
        failures.append(f"{what}: {detail}" if detail else what)


def done(what):
    print(f"deploy-check: {what}: {'ok' if not failures else 'FAILED'}")
    for failure in failures:
        print(f"  {failure}", file=sys.stderr)
    if failures:
        sys.exit(1)


def documents(path):
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def name_of(resource):
    return f"{resource['kind']}/{resource['metadata']['name']}"


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", text).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


# --- manifests ---------------------------------------------------------------

# The operator's resources have no schema in any package: this much of them is checked.
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
OPERATOR = {
    "ServiceMonitor": {
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
    own = OPERATOR.get(resource["kind"])
    if own:
        ok = resource["apiVersion"] == "monitoring.coreos.com/v1"
        check(what, ok, f"apiVersion {resource['apiVersion']}")
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
        mounts = [m["mountPath"] + "/" for m in container["volumeMounts"]]
        files = [path for variable, path in environment.items() if variable.startswith("FENCEPOST_TLS_")]
        plain = environment["FENCEPOST_ALLOW_PLAINTEXT"] == "true"
        check(what, plain == (not files), "neither TLS nor plaintext, or both")
        check(what, all(path.startswith(tuple(mounts)) for path in files), "a file of TLS is not on a volume")
        drain = seconds(environment["FENCEPOST_DRAIN_TIMEOUT"])
        check(what, pod["terminationGracePeriodSeconds"] >= drain + 5, "terminationGracePeriodSeconds below the drain")
        url = environment["FENCEPOST_DATABASE_URL_FILE"]
        check(what, url.startswith(tuple(mounts)), "the URL file is not on the volume")
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


def by_name(container):
    return {e["name"]: e["value"] for e in container["env"]}


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
            own |= {resource["kind"]} & OPERATOR.keys()
    done(f"{sum(map(len, rendered.values()))} manifests, by the strict schemas of Kubernetes {' and '.join(KUBERNETES)}")
    print(f"deploy-check: no schema of the operator's is to be had: of {', '.join(sorted(own))} the structure alone"
          " is checked, by our own")

    for origin, resources in rendered.items():
        check_server(origin, resources)
    done("pods are locked down; probes, ports and selectors meet")

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


# --- settings ----------------------------------------------------------------

def check_settings():
    flags = dict(re.findall(r'env = "(FENCEPOST_\w+)",\s*default_value = "([^"]*)"', read_sources("server/src")))
    known = set(re.findall(r'env = "(FENCEPOST_\w+)"', read_sources("server/src") + read_sources("client/cli/src")))
    check("flags of the server are not found", len(known) > 15 and "FENCEPOST_DRAIN_TIMEOUT" in flags)
    files = [p for p in HERE.rglob("*") if p.is_file() and p.suffix in (".yaml", ".service", ".tpl", "")
             and "secrets" not in p.relative_to(HERE).parts]
    for path in files:
        # An assignment, in YAML, a unit or a Dockerfile.
        for variable in re.findall(r"\b(FENCEPOST_[A-Z_]+)(?=[=:,])", path.read_text()):
            if variable == "FENCEPOST_PORT":
                continue
            check(f"{path.relative_to(ROOT)}", variable in known, f"the programs know no {variable}")
    drain = seconds(flags["FENCEPOST_DRAIN_TIMEOUT"])
    stop = re.search(r"^TimeoutStopSec=(\w+)$", (HERE / "systemd/fencepostd.service").read_text(), re.M)
    check("systemd: TimeoutStopSec is not above the drain", seconds(stop[1]) >= drain + 5)
    compose = yaml.safe_load((HERE / "compose.yaml").read_text())
    # Of that package the file alone is used; to import it takes more than is installed.
    package = Path(importlib.util.find_spec("check_jsonschema").submodule_search_locations[0])
    schema = package / "builtin_schemas/vendor/compose-spec.json"
    for error in jsonschema.Draft202012Validator(json.loads(schema.read_text())).iter_errors(compose):
        check("compose.yaml", False, f"{error.json_path}: {error.message}")
    done("compose.yaml, by its schema")
    for name, service in compose["services"].items():
        for secret in service.get("secrets", []):
            check(f"compose.yaml: {name}", secret in compose["secrets"], f"no secret {secret}")
        for other in service.get("depends_on", []):
            check(f"compose.yaml: {name}", other in compose["services"], f"no service {other}")
        if name.startswith("fencepost-"):
            check(f"compose.yaml: {name}", seconds(service["stop_grace_period"]) >= drain + 5, "stop_grace_period")
    done("settings are the programs', and stops are longer than the drain")


def read_sources(folder):
    return "\n".join(p.read_text() for p in sorted((ROOT / folder).rglob("*.rs")))


# --- alerts and dashboard ----------------------------------------------------

def metrics():
    """Every series name that there may be, and its labels."""
    series = {}
    for line in (HERE / "prometheus/metrics.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, kind, *labels = line.split()
        labels = set(labels[0].split(",")) if labels else set()
        if kind == "histogram":
            series |= {f"{name}_bucket": labels | {"le"}, f"{name}_count": labels, f"{name}_sum": labels}
        else:
            series[name] = labels
    return series


def check_metrics():
    """metrics.txt is the README's table, but for what clients tell of themselves."""
    rows = re.findall(r"^\| `(fencepost_\w+)` \| (\w+) \|([^|]*)\|", (ROOT / "README.md").read_text(), re.M)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
                  if not name.startswith("fencepost_client_")}
    listed = {}
    for line in (HERE / "prometheus/metrics.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, kind, *labels = line.split()
            listed[name] = (kind, set(labels[0].split(",")) if labels else set())
    for name in documented.keys() | listed.keys():
        check(name, documented.get(name) == listed.get(name),
              f"{documented.get(name)} in README.md, {listed.get(name)} in prometheus/metrics.txt")
    done(f"{len(listed)} metrics are the README's")


# What a scrape adds.
TARGET = {"namespace", "job", "instance", "pod"}


def check_expression(where, expression, series):
    names = re.findall(r"\b(fencepost_\w+)(?:\{([^}]*)\})?", expression)
    check(where, names, f"names no metric: {expression}")
    for name, matchers in names:
        check(where, name in series, f"there is no metric {name}")
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            check(where, label in series.get(name, set()) | TARGET, f"{name} has no label {label}")
    every = set().union(*(series.get(name, set()) for name, _ in names))
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        for label in re.split(r",\s*", labels):
            check(where, label in every | TARGET, f"no metric in it has the label {label}")


def anchors(text):
    """As the usual renderers of Markdown make them from headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def check_alerts():
    series = metrics()
    text = (HERE / "README.md").read_text()
    runbook = anchors(text)
    for page, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        target = HERE / page if page else HERE / "README.md"
        check("deploy/README.md", target.exists(), f"there is no {page}")
        check("deploy/README.md", not anchor or anchor in anchors(target.read_text()), f"{page} has no #{anchor}")
    rules = yaml.safe_load((HERE / "prometheus/fencepost.rules.yaml").read_text())
    alerts = {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}
    for name, rule in alerts.items():
        check_expression(name, rule["expr"], series)
        check(name, rule["labels"]["severity"] in ("info", "warning", "critical"), "severity")
        check(name, rule["annotations"].keys() == {"summary", "runbook_url"}, "annotations")
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        check(name, re.fullmatch(r"https://[^/]+/.*deploy/README\.md", page), f"{page} is no URL of the runbook")
        check(name, anchor in runbook, f"deploy/README.md has no #{anchor}")

    tests = yaml.safe_load((HERE / "prometheus/fencepost.test.yaml").read_text())["tests"]
    tested = [(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]]
    for name in alerts:
        for fires in (True, False):
            check(name, (name, fires) in tested, f"no test in which it {'fires' if fires else 'does not fire'}")
    for test in tests:
        for source in test["input_series"]:
            name = source["series"].partition("{")[0]
            check("fencepost.test.yaml", name in series or name == "up", f"there is no metric {name}")
    done(f"{len(alerts)} alerts: metrics, labels, tests, runbook")


def check_dashboard():
    series = metrics()
    board = json.loads((HERE / "grafana/fencepost.json").read_text())
    panels = [p for p in board["panels"] if p["type"] != "row"]
    check("dashboard: panels with one id", len({p["id"] for p in board["panels"]}) == len(board["panels"]))
    for panel in panels:
        check(panel["title"], panel.get("targets"), "asks nothing")
        check(panel["title"], panel.get("description"), "has no description")
        for target in panel["targets"]:
            check_expression(panel["title"], target["expr"], series)
    # For promtool, which knows no other way to look at an expression.
    expressions = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(expressions)]
    (RENDERED / "dashboard.rules").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    used = {name for panel in panels for target in panel["targets"]
            for name in re.findall(r"fencepost_\w+", target["expr"])}
    unused = {name.removesuffix("_bucket") for name in series if not name.endswith(("_sum", "_count"))
              and not any(u.startswith(name.removesuffix("_bucket")) for u in used)}
    check("dashboard", not unused, f"shows no {', '.join(sorted(unused))}")
    done(f"dashboard: {len(panels)} panels, every metric is there and shown")


check_settings()
check_manifests()
check_metrics()
check_alerts()
check_dashboard()
