//! What a server exports, read as Prometheus reads it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use fencepost_support::Server;

use crate::health;

/// One line: a name, its labels and a number.
#[derive(Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Sample {
    fn parse(line: &str) -> Self {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.strip_suffix('}').unwrap();
        // No value has a comma or a quote in it: no caller chose it.
        let pairs = labels.split(',').filter(|pair| !pair.is_empty());
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap();
            (key.to_owned(), value.trim_matches('"').to_owned())
        };
        Self {
            name: name.to_owned(),
            labels: pairs.map(pair).collect(),
            value: value.parse().unwrap_or_else(|_| panic!("{line}")),
        }
    }

    fn has(&self, labels: &[(&str, &str)]) -> bool {
        let mut labels = labels.iter();
        labels.all(|(key, value)| self.labels.get(*key).is_some_and(|found| found == value))
    }
}

/// All that a server exports at one moment.
pub(crate) struct Scrape {
    pub(crate) text: String,
    /// The kind of each metric.
    pub(crate) types: BTreeMap<String, String>,
    samples: Vec<Sample>,
}

impl Scrape {
    pub(crate) async fn of(server: &Server) -> Self {
        Self::at(server.http()).await
    }

    /// Of any program.
    pub(crate) async fn at(address: SocketAddr) -> Self {
        let (code, text) = health::get(address, "/metrics").await;
        assert_eq!(code, 200);
        let kind = |line: &str| {
            let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
            Some((name.to_owned(), kind.to_owned()))
        };
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        Self {
            types: text.lines().filter_map(kind).collect(),
            samples: samples.map(Sample::parse).collect(),
            text,
        }
    }

    /// The sum over all series with these labels, of which there is one at least.
    #[track_caller]
    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let of_name = self.samples.iter().filter(|sample| sample.name == name);
        let found: Vec<_> = of_name.filter(|sample| sample.has(labels)).collect();
        assert!(!found.is_empty(), "no {name} {labels:?} in {}", self.text);
        found.iter().map(|sample| sample.value).sum()
    }

    /// The samples of a metric: those of a histogram have names of their own.
    fn samples_of(&self, metric: &str) -> impl Iterator<Item = &Sample> {
        let names = ["", "_bucket", "_sum", "_count"].map(|end| format!("{metric}{end}"));
        let samples = self.samples.iter();
        samples.filter(move |sample| names.contains(&sample.name))
    }

    /// The labels of a metric, without those of the format.
    pub(crate) fn labels(&self, metric: &str) -> BTreeSet<String> {
        let labels = self
            .samples_of(metric)
            .flat_map(|sample| sample.labels.keys());
        labels.filter(|label| *label != "le").cloned().collect()
    }

    /// The values of a label.
    pub(crate) fn values(&self, metric: &str, label: &str) -> BTreeSet<String> {
        let samples = self.samples_of(metric);
        samples
            .filter_map(|sample| sample.labels.get(label))
            .cloned()
            .collect()
    }
}
