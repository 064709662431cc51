#!/bin/sh
# Installs what Fencepost needs from outside, when it is missing.
#
#   setup.sh          PostgreSQL's programs, for the private Postgres
#   setup.sh test     also PgBouncer, HAProxy, faketime and Python 3, for the tests
#   setup.sh bench    also etcd, ZooKeeper and Redis, for the benchmark; what cannot
#                     be installed is left out, and reported as not measured
#   setup.sh patroni  also Patroni, etcd and HAProxy, for failovers under load
#   setup.sh incident also Prometheus, for an incident that the alerts must see
#   setup.sh where    prints the directory of PostgreSQL's programs
#
# With everything in place it says nothing, changes nothing and takes no time.
# It never touches a cluster, a service or a setting that is already there.
set -eu

# Debian keeps pgbouncer and haproxy out of a plain user's path.
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# The oldest version that fencepostd starts.
OLDEST=15

# Prints the directory of PostgreSQL's programs, of the highest version in the
# places where fencepostd looks: packages' own, then the path. Remembers in
# $older whether there was but an older one.
older=
postgres_dir() {
    best=$((OLDEST - 1))
    best_dir=
    IFS=:
    for dir in \
        /usr/lib/postgresql/*/bin \
        /usr/pgsql-*/bin \
        /usr/bin \
        /usr/local/pgsql/bin \
        /opt/homebrew/opt/postgresql*/bin \
        /usr/local/opt/postgresql*/bin \
        $PATH
    do
        if [ ! -x "$dir/initdb" ] || [ ! -x "$dir/pg_ctl" ] || [ ! -x "$dir/postgres" ]; then
            continue
        fi
        major=$("$dir/postgres" --version | sed -n 's/.*(PostgreSQL) \([0-9]*\).*/\1/p')
        if [ "${major:-0}" -gt "$best" ]; then
            best=$major
            best_dir=$dir
        elif [ -z "$best_dir" ]; then
            older=$major
        fi
    done
    unset IFS
    [ -n "$best_dir" ] && printf '%s\n' "$best_dir"
}

is_root() { [ "$(id -u)" -eq 0 ]; }
can_install() { is_root || { have sudo && sudo -n true 2>/dev/null; }; }
as_root() { if is_root; then "$@"; else sudo -n "$@"; fi; }

# Runs a command and shows what it said only when it failed.
quietly() {
    said=$("$@" 2>&1 </dev/null) || { printf '%s\n' "$said" >&2; return 1; }
}

# --- apt: Debian, Ubuntu -----------------------------------------------------

apt_update() {
    say 'fetching the package lists'
    quietly as_root apt-get -qq update
}

apt_get_install() {
    quietly as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
        apt-get -qq -o DPkg::Lock::Timeout=120 --no-install-recommends -y install "$@"
}

# Fresh images come without package lists, old ones with lists of files that
# are gone by now: fetch them in these two cases only.
apt_install() {
    say "installing $*"
    if ! apt-get -qq -s install "$@" >/dev/null 2>&1; then
        apt_update
        apt_get_install "$@"
    elif ! said_first=$(apt_get_install "$@" 2>&1); then
        apt_update
        apt_get_install "$@" || { printf '%s\n' "$said_first" >&2; return 1; }
    fi
}

# Debian starts a "main" cluster with the first server package. Nobody asked for
# one here, so a file of our own says no, unless the administrator has spoken.
apt_postgres() {
    apt_install postgresql-common
    conf=/etc/postgresql-common/createcluster
    if ! grep -Eqs '^[[:space:]]*create_main_cluster' "$conf.conf" "$conf.d"/*.conf; then
        as_root mkdir -p "$conf.d"
        printf '%s\n' \
            '# Fencepost brought PostgreSQL for its programs and runs a server of its own.' \
            '# Delete this file to get a "main" cluster with each new major version.' \
            'create_main_cluster = false' \
            | as_root tee "$conf.d/fencepost.conf" >/dev/null
    fi
    apt_install postgresql
}

# apt_without_service PACKAGE [SERVICE]: Debian's packages enable and start a
# service. The mask lives in /run: were this script killed half-way, the next
# boot would forget it.
apt_without_service() {
    service=${2-$1}
    if [ -d /run/systemd/system ]; then
        as_root systemctl --quiet --runtime mask "$service.service"
        installed=0
        apt_install "$1" || installed=$?
        as_root systemctl --quiet --runtime unmask "$service.service"
        [ "$installed" -eq 0 ] || return "$installed"
        as_root systemctl --quiet disable "$service.service" 2>/dev/null
    else
        apt_install "$1" || return
        as_root update-rc.d "$service" disable >/dev/null
        quietly as_root "/etc/init.d/$service" stop
    fi
}

# --- what is needed, by package manager --------------------------------------

# install NAME: gets a program of this name, or says how.
install() {
    if have apt-get; then
        case $1 in
        postgres) package=postgresql ;;
        etcd) package=etcd-server ;;
        *) package=$1 ;;
        esac
        can_install || die "$1 is missing. Run as root: apt-get install $package"
        case $1 in
        postgres) apt_postgres ;;
        pgbouncer | haproxy | patroni | prometheus) apt_without_service "$1" ;;
        etcd) apt_without_service "$package" etcd ;;
        *) apt_install "$package" ;;
        esac
    elif have dnf; then
        case $1 in
        postgres) package=postgresql-server ;;
        faketime) package=libfaketime ;;
        *) package=$1 ;;
        esac
        can_install || die "$1 is missing. Run as root: dnf install $package"
        say "installing $package"
        quietly as_root dnf -q -y install "$package"
    elif have brew; then
        case $1 in
        postgres) package=postgresql@17 ;;
        faketime) package=libfaketime ;;
        *) package=$1 ;;
        esac
        die "$1 is missing. Run: brew install $package"
    else
        die "$1 is missing, and neither apt-get, dnf nor brew is here: install it by hand"
    fi
}

need_build_tools() {
    have cargo || die 'cargo is missing. Install a Rust toolchain: https://rustup.rs'
    have cc || die 'cc is missing. Install a C compiler (Debian: apt-get install gcc libc6-dev)'
}

need_postgres() {
    postgres_dir >/dev/null && return
    # Beside an older one nothing is installed: it may have clusters.
    [ -n "$older" ] || install postgres
    postgres_dir >/dev/null && return
    die "PostgreSQL $OLDEST or later is needed${older:+, found $older}: https://www.postgresql.org/download/"
}

# Debian's package is content with the client of any store: ours is etcd.
need_patroni() {
    need_program patroni
    if have dpkg && ! dpkg -s python3-etcd >/dev/null 2>&1; then
        install python3-etcd
    fi
}

need_program() {
    have "$1" && return
    install "$1"
    have "$1" || die "$1 was installed, but is not in the path"
}

# want_peer PACKAGE WHAT [SERVICE]: the benchmark runs without it, so only Debian's
# package is looked for, and nobody is told to install it by hand.
want_peer() {
    [ -e "$2" ] || [ -n "$(command -v "$2")" ] && return
    if have apt-get && can_install; then
        if [ -n "${3-}" ]; then
            apt_without_service "$1" "$3" && return
        else
            apt_install "$1" && return
        fi
    fi
    say "$1 is missing: it will not be measured"
}

case ${1-run} in
run)
    need_build_tools
    need_postgres
    ;;
test)
    need_build_tools
    need_postgres
    need_program pgbouncer
    need_program haproxy
    need_program faketime
    need_program python3
    ;;
patroni)
    need_build_tools
    need_postgres
    need_program haproxy
    need_program etcd
    need_patroni
    ;;
incident)
    need_build_tools
    need_postgres
    need_program prometheus
    need_program python3
    ;;
bench)
    need_build_tools
    need_postgres
    want_peer etcd-server etcd etcd
    # Not zookeeperd, which is a service.
    want_peer zookeeper /usr/share/java/zookeeper.jar
    want_peer redis-server redis-server redis-server
    ;;
where)
    postgres_dir
    ;;
*)
    die "unknown word '$1': run, test, bench, patroni, incident or where"
    ;;
esac
