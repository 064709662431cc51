"""An incident, watched by a real Prometheus with the alerts and the dashboard of this folder: two replicas under
load lose their database for a while, and get it back.

    incident.py BIN_DIR     BIN_DIR has fencepostd and fencepost; twelve minutes, most of them the `for:` of alerts

The rules run as they are, with their own times. Everything listens on loopback, on ports of its own, and is gone
at the end.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.argv[1]).resolve()

# Seconds. A minute, and what an alert with `for: 1m` needs to see it through.
AWAY = 75
CALLERS = 4
# Of holders: their streams fail shortly before the leases end, so these do not fail at once.
TTLS = ["20s", "60s"] * 3

# What such an incident sets off: no replica is ready, calls and streams fail, and no lease outlives it.
# Not FencepostPoolOverdue: connections to a database that answers nobody are let go.
EXPECTED = {"FencepostNoReplicaReady", "FencepostNotReady", "FencepostCallsFailing", "FencepostStreamsEnding",
            "FencepostLeasesLost"}
# Those that are over with their cause. The others look back, for up to ten minutes.
AT_ONCE = {"FencepostNoReplicaReady", "FencepostNotReady"}
PATIENCE = 13 * 60
# Panels that have nothing to show: there is no TLS here.
EMPTY = {"Certificate ends in"}

BEGAN = time.monotonic()
failures = []


def say(text):
    print(f"incident: {time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def check(ok, text):
    if not ok:
        failures.append(text)
        say(f"FAILED: {text}")


def wait_for(what, look, patience=60):
    until = time.monotonic() + patience
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(0.5)
    raise SystemExit(f"incident: in {patience} s not seen: {what}")


# --- what takes part -----------------------------------------------------------


class World:
    """The processes of this run, and their folder."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="fencepost-incident-"))
        self.over = threading.Event()
        self.running = []
        self.loads = []
        # Postgres does not run as root.
        self.as_user = []
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody")
            self.as_user = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"]

    def start(self, name, *command, words=(), env=None):
        """Starts a program, which does not outlive this one. `words` are setpriv's."""
        command = ["setpriv", "--pdeathsig=KILL", *words, *command]
        log = open(self.folder / f"{name}.log", "ab")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=env)
        log.close()
        self.running.append(process)
        return process

    def load(self, work, *arguments):
        self.loads.append(threading.Thread(target=work, args=(self, *arguments)))
        self.loads[-1].start()

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def close(self):
        self.over.set()
        for load in self.loads:
            load.join()
        for process in reversed(self.running):
            tell(process, signal.SIGCONT)
            # To Postgres it says: at once. To the others: now.
            process.send_signal(signal.SIGINT)
        for process in reversed(self.running):
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.folder)


def children(process):
    """Postgres makes each of them a group of its own."""
    stats = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append(stat.read_text())
        except OSError:
            continue
    parents = {int(s.split(" ", 1)[0]): int(s.rpartition(")")[2].split()[1]) for s in stats}
    return [pid for pid, parent in parents.items() if parent == process.pid]


def tell(process, number):
    """Signals a process, if it is there, and then its children: a stopped one has no more of them."""
    if process.poll() is None:
        process.send_signal(number)
        for pid in children(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_postgres(world):
    programs = subprocess.run([HERE / "setup.sh", "where"], capture_output=True, text=True, check=True).stdout.strip()
    data, port = world.folder / "data", free_port()
    subprocess.run(["setpriv", *world.as_user, f"{programs}/initdb", "-D", data, "-U", "fencepost", "-A", "trust",
                    "-E", "UTF8", "--locale=C", "-N"], check=True, stdout=subprocess.DEVNULL, cwd=world.folder)
    settings = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={port}",
                "-c", f"unix_socket_directories={world.folder}"]
    process = world.start("postgres", f"{programs}/postgres", "-D", str(data), *settings, words=world.as_user)
    url = f"postgresql://fencepost@127.0.0.1:{port}/postgres"
    wait_for("Postgres", lambda: "ready to accept connections" in world.log("postgres"))
    return process, url


def start_replica(world, name, url):
    process = world.start(name, BIN / "fencepostd", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
                          "--log-format", "json", "--drain-delay", "0s", "--metrics-prefixes", "8",
                          env={"PATH": os.environ["PATH"], "FENCEPOST_DATABASE_URL": url})

    def serving():
        lines = [json.loads(line) for line in world.log(name).splitlines() if line.startswith("{")]
        return next((line for line in lines if line["message"] == "serving"), None)

    line = wait_for(name, serving)
    return process, line["grpc"], line["http"]


def start_prometheus(world, targets):
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(HERE.resolve() / "prometheus/fencepost.rules.yaml")],
        "scrape_configs": [{"job_name": "fencepost",
                            "static_configs": [{"targets": targets, "labels": {"namespace": "locks"}}]}],
    }
    # JSON is YAML.
    (world.folder / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    world.start("prometheus", "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb",
                f"--web.listen-address=127.0.0.1:{port}")
    return Prometheus(f"http://127.0.0.1:{port}/api/v1")


class Prometheus:
    def __init__(self, address):
        self.address = address
        wait_for("Prometheus", self.is_up)

    def is_up(self):
        try:
            return self.ask("rules")
        except OSError:
            return None

    def ask(self, path, **query):
        with urllib.request.urlopen(f"{self.address}/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)["data"]

    def rules(self):
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def alerts(self):
        """The alerts that are pending or firing."""
        found = {}
        for alert in self.ask("alerts")["alerts"]:
            name = alert["labels"]["alertname"]
            if found.get(name) != "firing":
                found[name] = alert["state"]
        return found


# --- the load ------------------------------------------------------------------


def client(endpoints, *words):
    """Runs one command of the client, which waits a little longer than a server takes."""
    ended = subprocess.run([BIN / "fencepost", *words, "--endpoint", endpoints, "--timeout", "7s", "--output", "json"],
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return ended.returncode, ended.stdout


def acquire(endpoints, name, ttl):
    code, out = client(endpoints, "acquire", name, "--ttl", ttl)
    return json.loads(out)["lock"] if code == 0 else None


def hold(world, endpoints, number, ttl):
    """Keeps a lock by a stream, and asks what has become of it when there is none any more."""
    name = f"held-{number}"
    while not world.over.wait(0.5):
        lock = acquire(endpoints, name, ttl)
        if not lock:
            continue
        who = [name, "--owner", lock["owner"], "--token", str(lock["fencing_token"])]
        stream = world.start(name, BIN / "fencepost", "keepalive", *who, "--endpoint", endpoints)
        while stream.poll() is None and not world.over.wait(0.2):
            pass
        stream.terminate()
        stream.wait()
        world.running.remove(stream)
        # 69: no server, or no answer in time.
        while not world.over.is_set() and client(endpoints, "renew", *who)[0] == 69:
            pass


def cycle(world, endpoints, number):
    """Takes a lock, looks at it and gives it back, again and again. Renewals are those of holders alone: leases that
    are lost count as a share of them."""
    n = 0
    while not world.over.wait(0.1):
        n += 1
        name = f"cycle-{number}-{n % 50}"
        lock = acquire(endpoints, name, "10s")
        client(endpoints, "get", name)
        if lock:
            who = [name, "--owner", lock["owner"], "--token", str(lock["fencing_token"])]
            client(endpoints, "release", *who)


# --- the incident ---------------------------------------------------------------


class Watch:
    """What alerts do."""

    def __init__(self, prometheus):
        self.prometheus = prometheus
        self.now = {}
        # When they did first.
        self.fired = {}

    def until(self, likes, patience):
        """Says what alerts do, until what they do is liked. False when there is no more patience."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            before, self.now = self.now, self.prometheus.alerts()
            for name in sorted(self.now.keys() | before.keys()):
                if self.now.get(name) != before.get(name):
                    say(f"{name}: {self.now.get(name, 'resolved')}")
                if self.now.get(name) == "firing":
                    self.fired.setdefault(name, time.monotonic() - BEGAN)
            if likes(self.now):
                return True
            time.sleep(1)
        return False

    def keep_on(self, how_long):
        self.until(lambda _: False, how_long)


def check_dashboard(prometheus, since):
    board = json.loads((HERE / "grafana/fencepost.json").read_text())
    queries = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", [])]
    for title, query in queries:
        query = query.replace("$__rate_interval", "1m")
        query = re.sub(r"\$(namespace|job)\b", ".*", query)
        series = prometheus.ask("query_range", query=query, start=since, end=time.time(), step=5)["result"]
        numbers = [value for one in series for _, value in one["values"] if not math.isnan(float(value))]
        check(numbers or title in EMPTY, f"the dashboard shows nothing in {title!r}: {query}")
    say(f"dashboard: {len(queries)} queries asked")


def incident(world):
    postgres, url = start_postgres(world)
    # The tokens of a new database leap once, which is an alert of its own: not what is looked for here.
    first, grpc, _ = start_replica(world, "first", url)
    wait_for("a first grant", lambda: acquire(f"http://{grpc}", "first", "10s"))
    first.terminate()
    first.wait()
    replicas = [start_replica(world, name, url) for name in ("a", "b")]
    endpoints = ",".join(f"http://{grpc}" for _, grpc, _ in replicas)
    since = time.time()
    prometheus = start_prometheus(world, [http for _, _, http in replicas])
    broken = [rule["name"] for rule in prometheus.rules() if rule["health"] == "err"]
    check(not broken, f"rules that cannot be evaluated: {broken}")
    known = {rule["name"] for rule in prometheus.rules()}
    check(EXPECTED <= known, f"there are no alerts {EXPECTED - known}")
    for number, ttl in enumerate(TTLS):
        world.load(hold, endpoints, number, ttl)
    for number in range(CALLERS):
        world.load(cycle, endpoints, number)

    # Longer than the first scrapes need; an alert on a healthy system would show.
    watch = Watch(prometheus)
    watch.keep_on(40)
    check(not watch.now, f"not calm before anything happened: {watch.now}")

    say(f"the database is away, for {AWAY} s")
    away = time.monotonic() - BEGAN
    tell(postgres, signal.SIGSTOP)
    watch.keep_on(AWAY)
    tell(postgres, signal.SIGCONT)
    say("the database is back")
    check(watch.until(lambda now: not now.keys() & AT_ONCE, 30), f"not resolved in half a minute: {watch.now}")
    # So that rates of one minute see the load again.
    watch.keep_on(90)
    check_dashboard(prometheus, since)
    fired = watch.fired
    calm = watch.until(lambda now: not now and EXPECTED <= fired.keys(), PATIENCE)
    check(calm, f"not resolved, or never fired: {watch.now}")

    for name in sorted(known, key=lambda name: fired.get(name, math.inf)):
        when = f"fired {fired[name] - away:.0f} s after the database went away" if name in fired else "did not fire"
        say(f"{name}: {when}")
        check((name in fired) == (name in EXPECTED), f"{name} {when}")
    for process, _, _ in replicas:
        check(process.poll() is None, "a replica has ended")


def stop(number, _frame):
    raise SystemExit(128 + number)


def main():
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    world = World()
    try:
        incident(world)
    finally:
        world.close()
    if failures:
        raise SystemExit(f"incident: {len(failures)} FAILED")
    say("ok")


main()
