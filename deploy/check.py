"""What check.sh cannot ask a program for: the Kubernetes schemas, and whether the files agree with
each other and with the server's flags, metrics and runbook.

    check.py DIRECTORY      DIRECTORY has what kustomize and helm have rendered
"""

import importlib.util
import json
import re
from pathlib import Path

import jsonschema
import yaml

from check_common import HERE, RENDERED, ROOT, check, done, seconds
from check_manifests import check_manifests


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

    tests = [test for path in sorted(HERE.glob("prometheus/*.test.yaml"))
             for test in yaml.safe_load(path.read_text())["tests"]]
    tested = [(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]]
    for name in alerts:
        for fires in (True, False):
            check(name, (name, fires) in tested, f"no test in which it {'fires' if fires else 'does not fire'}")
    for test in tests:
        for source in test["input_series"]:
            name = source["series"].partition("{")[0]
            check(test["name"], name in series or name == "up", f"there is no metric {name}")
    done(f"{len(alerts)} alerts: metrics, labels, tests, runbook")


def check_log_lines():
    """What the docs say that the log says, it says: words in code after `log`, `logs` or `logged`."""
    sources = re.sub(r"\\\n\s*|^\s*//.*", "", read_sources("server/src"), flags=re.M)
    quoted = 0
    for path in [ROOT / "README.md", *sorted(HERE.rglob("README.md")), *sorted(HERE.rglob("*.rules.yaml"))]:
        text = " ".join(re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S).split())
        for line in re.findall(r"\b[Ll]og(?:s|ged)?\b[^`]*`([A-Za-z][\w']*(?: [\w']+)+)`", text):
            quoted += 1
            check(path.relative_to(ROOT), line in sources, f"the server logs no `{line}`")
    check("no quoted lines of the log are found", quoted > 7)
    done(f"{quoted} lines of the log are the server's")


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
check_log_lines()
check_dashboard()
