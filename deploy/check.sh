#!/bin/sh
# Checks what operators run, without a cluster, a daemon or a build:
#
#   check.sh           everything, with the programs that `make deploy-check` names:
#                      HADOLINT, PROMTOOL, KUBECTL, HELM and PYTHON
#   check.sh write     makes kubernetes/monitoring/prometheusrule.yaml from prometheus/*.rules.yaml
#
# Nothing is skipped in silence: what is missing is an error, and what cannot be
# checked is said.
set -eu

cd "$(dirname "$0")"
rules=prometheus/fencepost.rules.yaml

# prometheus_rule: the rules as the operator's resource.
prometheus_rule() {
    cat <<'HEAD'
# Made by `deploy/check.sh write` from deploy/prometheus/fencepost.rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: fencepost
  labels:
    app.kubernetes.io/name: fencepost
    app.kubernetes.io/instance: fencepost
spec:
HEAD
    sed -n '/^groups:/,$p' "$rules" | sed 's/^./  &/'
}

if [ "${1-}" = write ]; then
    prometheus_rule >kubernetes/monitoring/prometheusrule.yaml
    exit
fi

say() { printf '%s\n' "deploy-check: $*"; }
die() { say "$*" >&2; exit 1; }

for program in "${HADOLINT:?run make deploy-check}" "$PROMTOOL" "$KUBECTL" "$HELM" "$PYTHON"; do
    [ -x "$program" ] || die "$program is missing: make clean-tools deploy-check"
done
command -v systemd-analyze >/dev/null || die 'systemd-analyze is missing (Debian: apt-get install systemd)'

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# quietly WHAT COMMAND...: shows what it said only when it failed.
quietly() {
    what=$1
    shift
    "$@" >"$tmp/said" 2>&1 </dev/null || { cat "$tmp/said" >&2; die "$what: FAILED"; }
    say "$what: ok"
}

quietly 'Dockerfile, by hadolint' "$HADOLINT" Dockerfile
quietly 'alerts, by promtool check rules' "$PROMTOOL" check rules "$rules"
quietly 'alerts fire and do not fire, by promtool test rules' "$PROMTOOL" test rules prometheus/*.test.yaml

quietly "the runbook's SQL, on a Postgres" ./check-sql.sh

prometheus_rule >"$tmp/prometheusrule.yaml"
cmp -s "$tmp/prometheusrule.yaml" kubernetes/monitoring/prometheusrule.yaml \
    || die 'kubernetes/monitoring/prometheusrule.yaml is not what the rules are: run deploy/check.sh write'

# The program is not installed here, so another one stands in for it.
sed 's|^ExecStart=[^ ]*|ExecStart=/bin/true|' systemd/fencepostd.service >"$tmp/fencepostd.service"
quietly 'unit, by systemd-analyze verify' systemd-analyze verify "$tmp/fencepostd.service"
[ ! -s "$tmp/said" ] || { cat "$tmp/said" >&2; die 'systemd-analyze verify warns'; }
quietly 'unit, exposure at most 1.5 of 10, by systemd-analyze security' \
    systemd-analyze security --no-pager --offline=true --threshold=15 "$tmp/fencepostd.service"

for overlay in base monitoring example example-tls; do
    "$KUBECTL" kustomize "kubernetes/$overlay" >"$tmp/kustomize-$overlay.yaml" || die "kustomize $overlay: FAILED"
done
# What it finds in the caller's home is no business of ours.
export HELM_CACHE_HOME="$tmp" HELM_CONFIG_HOME="$tmp" HELM_DATA_HOME="$tmp"
quietly 'chart, by helm lint' "$HELM" lint --strict helm/fencepost
# Its word on standard error is that the chart has links.
# template AS ARGUMENT...
template() {
    as=$1
    shift
    "$HELM" template "$@" >"$tmp/helm-$as.yaml" 2>"$tmp/said" || { cat "$tmp/said" >&2; die 'helm template: FAILED'; }
}
template default fencepost helm/fencepost
template all locks helm/fencepost -f helm/all.yaml
template openshift fencepost helm/fencepost -f helm/openshift.yaml
template alone fencepost helm/fencepost --set migrate=false,env.FENCEPOST_PGBOUNCER=true
for bad in replicas=0 env.FENCEPOST_LISTEN=x env.OTHER=x env.SSL_CERT=x env.FENCEPOST_LOG.a=x extraVolumes.a=x extraVolumeMounts.a=x \
    drain.timeoutSeconds=3 databse.port=1; do
    ! "$HELM" template fencepost helm/fencepost --set "$bad" >/dev/null 2>&1 || die "the chart takes --set $bad"
done
say 'chart refuses bad values: ok'
# notes WANTED ARGUMENT...: what an installation says, without a cluster.
notes() {
    wanted=$1
    shift
    "$HELM" install fencepost helm/fencepost --namespace locks --dry-run=client "$@" >"$tmp/notes" 2>&1 || true
    grep -qx "$wanted" "$tmp/notes" || { sed -n '/^NOTES:/,$p' "$tmp/notes" >&2; die "the chart's notes do not say: $wanted"; }
}
notes 'Others: http://fencepost.locks:50051'
notes 'Others: https://fencepost.locks:50051' --set tls.secretName=fencepost-tls
say "chart's notes: ok"

"$PYTHON" -B check.py "$tmp"
# check.py has left the dashboard's expressions as rules.
quietly "the dashboard's expressions, by promtool check rules" "$PROMTOOL" check rules "$tmp/dashboard.rules"
