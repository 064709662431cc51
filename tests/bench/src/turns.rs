//! Rounds in turn: in each, every contender is measured once, so that what
//! disturbs the machine hits all alike.

use rand::seq::SliceRandom as _;

use crate::{
    load::{self, Round, Timing, Work},
    systems::System,
};

/// What a contender did in each round.
pub(crate) type Rounds = Vec<Round>;

/// How contenders are measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turns {
    pub(crate) rounds: u16,
    pub(crate) timing: Timing,
    pub(crate) work: Work,
    pub(crate) clients: usize,
}

impl Turns {
    /// Measures the contenders, and returns their rounds in the order given.
    ///
    /// All of them are up, and those whose turn it is not are idle. The order is
    /// drawn for each round, so that nobody always follows the same one, and pays
    /// for what that one still writes or closes.
    pub(crate) async fn measure(&self, contenders: &[&dyn System]) -> Vec<Rounds> {
        let mut results = vec![Rounds::new(); contenders.len()];
        for _ in 0..self.rounds {
            let mut order: Vec<usize> = (0..contenders.len()).collect();
            order.shuffle(&mut rand::rng());
            for n in order {
                results[n].push(self.one_round(contenders[n]).await);
            }
        }
        results
    }

    async fn one_round(&self, system: &dyn System) -> Round {
        let names: Vec<String> = match self.work {
            Work::Contend { .. } => vec!["hot".to_owned(); self.clients],
            Work::Mixed { .. } => (0..self.clients)
                .map(|n| match n % 4 {
                    0 => format!("shared-{}", n / 32),
                    _ => format!("own-{n}"),
                })
                .collect(),
            // With a prefix, for metrics that tell prefixes apart.
            Work::Cycle | Work::Renew => {
                (0..self.clients).map(|n| format!("own-{n}.lock")).collect()
            }
        };
        match system.clients(&names).await {
            Ok(clients) => load::run(clients, self.work, self.timing, &system.processes()).await,
            Err(error) => Round {
                errors: 1,
                first_error: Some(format!("no clients: {error}")),
                ..Round::default()
            },
        }
    }
}
