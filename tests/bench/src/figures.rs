//! What Fencepost must reach, as ratios of medians of one run.

use crate::{
    args::{Kind, Scenario},
    load::Round,
    stats::Row,
};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) what: &'static str,
    pub(crate) bound: Bound,
    /// None when one of its rows was not measured.
    pub(crate) measured: Option<f64>,
}

impl Figure {
    pub(crate) fn is_reached(&self) -> Option<bool> {
        let measured = self.measured?;
        Some(match self.bound {
            Bound::AtLeast(limit) => measured >= limit,
            Bound::AtMost(limit) => measured <= limit,
        })
    }
}

/// All of them, from the rows of a run.
pub(crate) fn all(rows: &[Row]) -> Vec<Figure> {
    use Bound::{AtLeast, AtMost};
    use Kind::{Etcd, Fencepost, GrpcNoop, SqlPerCall, Zookeeper};
    use Scenario::{Hot, Keepalive, MillionRows, Uncontended};

    let rows = Rows(rows);
    let cycles = |kind, clients| rows.find(kind, Uncontended, clients)?.cycles_per_s();
    let over = |kind, clients| ratio(cycles(Fencepost, clients), cycles(kind, clients));
    let p99 = |kind| rows.find(kind, Uncontended, 64)?.p99_us();
    let extra = |scenario, clients, key| rows.find(Fencepost, scenario, clients)?.number(key);
    let figure = |what, bound, measured| Figure {
        what,
        bound,
        measured,
    };

    // What one client waits for when nothing is added to SQL and gRPC.
    let parts = [SqlPerCall, GrpcNoop].map(|kind| cycles(kind, 1).map(f64::recip));
    let parts = parts[0].zip(parts[1]).map(|(sql, grpc)| sql + grpc);
    let answers = |round: &Round| round.answers_per_s;
    let hot_answers = rows
        .find(Fencepost, Hot, 256)
        .and_then(|row| row.median(answers));
    let noop_calls = rows.find(GrpcNoop, Hot, 256).and_then(Row::cycles_per_s);
    let full = rows.find(Fencepost, MillionRows, 64);
    let on_full = full.and_then(Row::cycles_per_s);
    let on_empty = full.and_then(|row| row.number("empty_cycles_per_s"));

    vec![
        figure(
            "uncontended over etcd, 64 clients",
            AtLeast(3.0),
            over(Etcd, 64),
        ),
        figure(
            "uncontended over etcd, 256 clients",
            AtLeast(3.0),
            over(Etcd, 256),
        ),
        figure(
            "uncontended over ZooKeeper, 64 clients",
            AtLeast(1.5),
            over(Zookeeper, 64),
        ),
        figure(
            "uncontended over ZooKeeper, 256 clients",
            AtLeast(1.5),
            over(Zookeeper, 256),
        ),
        figure(
            "uncontended over one SQL statement a call, 64 clients and connections",
            AtLeast(2.0),
            over(SqlPerCall, 64),
        ),
        figure(
            "uncontended over gRPC calls that do nothing, 256 clients",
            AtLeast(0.65),
            over(GrpcNoop, 256),
        ),
        figure(
            "one client: cycle time over a direct SQL cycle and two calls that do nothing",
            AtMost(1.15),
            ratio(cycles(Fencepost, 1).map(f64::recip), parts),
        ),
        figure(
            "hot name, 256 contenders: answered Acquires over calls that do nothing",
            AtLeast(0.7),
            // A cycle of theirs is two calls.
            ratio(hot_answers, noop_calls.map(|cycles| 2.0 * cycles)),
        ),
        figure(
            "p99 over etcd's p99, 64 clients",
            AtMost(0.5),
            ratio(p99(Fencepost), p99(Etcd)),
        ),
        figure(
            "10,000 streams: server, % of a core",
            AtMost(15.0),
            extra(Keepalive, 10_000, "server_cpu_percent"),
        ),
        figure(
            "10,000 streams: server, MiB resident",
            AtMost(150.0),
            extra(Keepalive, 10_000, "server_rss_mib"),
        ),
        figure(
            "10,000 streams: renewals later than half a TTL",
            AtMost(0.0),
            extra(Keepalive, 10_000, "renewals_late"),
        ),
        figure(
            "10,000 streams: streams that died",
            AtMost(0.0),
            extra(Keepalive, 10_000, "streams_died"),
        ),
        figure(
            "10,000 streams: streams never renewed",
            AtMost(0.0),
            extra(Keepalive, 10_000, "streams_never_renewed"),
        ),
        figure(
            "64 clients on a table of 1 million rows over an empty one",
            AtLeast(0.9),
            ratio(on_full, on_empty),
        ),
        figure(
            "heap-only updates, %",
            AtLeast(95.0),
            extra(Uncontended, 64, "hot_update_percent"),
        ),
    ]
}

struct Rows<'a>(&'a [Row]);

impl<'a> Rows<'a> {
    fn find(&self, kind: Kind, scenario: Scenario, clients: usize) -> Option<&'a Row> {
        self.0
            .iter()
            .find(|row| (row.kind, row.scenario, row.clients) == (kind, scenario, clients))
    }
}

fn ratio(ours: Option<f64>, theirs: Option<f64>) -> Option<f64> {
    let ratio = ours? / theirs?;
    ratio.is_finite().then_some(ratio)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kind: Kind, scenario: Scenario, clients: usize, cycles_per_s: f64) -> Row {
        let round = Round {
            cycles_per_s,
            answers_per_s: 30.0 * cycles_per_s,
            p50_us: 100.0,
            p99_us: 1e6 / cycles_per_s,
            ..Round::default()
        };
        Row::new(kind, scenario, clients, vec![round])
    }

    fn of<'a>(figures: &'a [Figure], what: &str) -> &'a Figure {
        let figure = figures.iter().find(|figure| figure.what.contains(what));
        figure.unwrap()
    }

    #[test]
    fn ratios_are_ours_over_theirs() {
        let figures = all(&[
            row(Kind::Fencepost, Scenario::Uncontended, 64, 9000.0),
            row(Kind::Etcd, Scenario::Uncontended, 64, 3000.0),
            row(Kind::SqlPerCall, Scenario::Uncontended, 64, 6000.0),
            row(Kind::Fencepost, Scenario::Hot, 256, 1000.0),
            row(Kind::GrpcNoop, Scenario::Hot, 256, 20_000.0),
        ]);
        let etcd = of(&figures, "uncontended over etcd, 64");
        assert_eq!((etcd.measured, etcd.is_reached()), (Some(3.0), Some(true)));
        let sql = of(&figures, "one SQL statement");
        assert_eq!((sql.measured, sql.is_reached()), (Some(1.5), Some(false)));
        let p99 = of(&figures, "p99");
        assert!((p99.measured.unwrap() - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(of(&figures, "hot name").measured, Some(0.75));
        let zookeeper = of(&figures, "ZooKeeper, 64");
        assert_eq!((zookeeper.measured, zookeeper.is_reached()), (None, None));
    }

    #[test]
    fn one_client_is_compared_with_the_sum_of_its_parts() {
        let figures = all(&[
            row(Kind::Fencepost, Scenario::Uncontended, 1, 500.0),
            row(Kind::SqlPerCall, Scenario::Uncontended, 1, 1000.0),
            row(Kind::GrpcNoop, Scenario::Uncontended, 1, 4000.0),
        ]);
        let measured = of(&figures, "one client").measured.unwrap();
        assert!((measured - 1.6).abs() < 1e-9, "{measured}");
    }
}
