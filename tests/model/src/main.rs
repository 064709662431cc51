//! `fencepost-model`: random clients against replicas that run, and the checker on
//! histories that were saved.
#![expect(clippy::print_stdout, reason = "its output is what it is for")]

use std::{
    error::Error, fs::File, io::BufReader, path::PathBuf, process::ExitCode, time::Duration,
};

use clap::{Parser, Subcommand};
use fencepost_model::{
    Load, Options, Summary, check, default_directory,
    history::{History, What},
    mutants::{MUTANTS, Mutant},
    save, verdict,
};

#[derive(Debug, Parser)]
#[command(
    name = "fencepost-model",
    about = "Random clients, and what must hold of what they see"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Load replicas, and check the history.
    Run {
        /// A replica; may be given several times, or separated by commas.
        #[arg(long, required = true, value_delimiter = ',')]
        endpoint: Vec<String>,

        /// The database of the fenced register; without it nothing is written.
        #[arg(long)]
        register: Option<String>,

        /// Of the random choices; random unless given.
        #[arg(long)]
        seed: Option<u64>,

        /// For how long, s.
        #[arg(long, default_value_t = 10)]
        seconds: u64,

        /// How many clients.
        #[arg(long, default_value_t = 12)]
        clients: usize,

        /// How many resources they contend for.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
        resources: u16,

        /// Something else breaks the system meanwhile: excuse what a fault excuses.
        #[arg(long)]
        faults: bool,

        /// Where a contradictory history is saved [target/model].
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Break the server on purpose, one rule at a time, and see what notices. Starts
    /// databases and replicas of its own.
    Mutants {
        /// Only those with all these words in their name.
        words: Vec<String>,

        /// Only say which there are.
        #[arg(long)]
        list: bool,

        /// How many seeds are tried until one shows it; of what is not broken, half as
        /// many.
        #[arg(long, default_value_t = 8)]
        seeds: u64,

        /// For how long each, s.
        #[arg(long, default_value_t = 8)]
        seconds: u64,
    },
    /// Check a history that was saved.
    Check {
        /// Its file.
        file: PathBuf,
    },
}

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse().command).await {
        Ok(code) => code,
        Err(error) => {
            println!("fencepost-model: {error}");
            ExitCode::from(70)
        }
    }
}

async fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Run {
            endpoint,
            register,
            seed,
            seconds,
            clients,
            resources,
            faults,
            out,
        } => {
            let options = Options {
                register,
                clients,
                resources: resources.into(),
                ..Options::new(seed.unwrap_or_else(rand::random), endpoint)
            };
            let load = Load::start(options).await?;
            let from = load.now();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            if faults {
                load.event(from, What::Fault("whatever else is done".to_owned()));
            }
            let history = load.stop().await?;
            let out = out.unwrap_or_else(default_directory);
            match verdict(&history, &out) {
                Ok(summary) => println!("{summary}\nno contradiction"),
                Err(contradiction) => {
                    println!("{}\n{contradiction}", Summary::of(&history));
                    return Ok(ExitCode::FAILURE);
                }
            }
        }
        Command::Mutants {
            words,
            list,
            seeds,
            seconds,
        } => {
            let is_meant = |mutant: &&Mutant| words.iter().all(|word| mutant.name.contains(word));
            let chosen: Vec<_> = MUTANTS.iter().filter(is_meant).collect();
            if chosen.is_empty() {
                println!(
                    "fencepost-model: no mutant has \"{}\" in its name; there are:",
                    words.join(" ")
                );
                names(MUTANTS);
                return Ok(ExitCode::from(64));
            }
            if list {
                names(chosen);
                return Ok(ExitCode::SUCCESS);
            }
            return mutants(&chosen, seeds, Duration::from_secs(seconds)).await;
        }
        Command::Check { file } => {
            let opened = match File::open(&file) {
                Ok(opened) => opened,
                Err(error) => {
                    println!("fencepost-model: {}: {error}", file.display());
                    return Ok(ExitCode::from(66));
                }
            };
            let history = History::load(BufReader::new(opened))
                .map_err(|error| format!("{}: {error}", file.display()))?;
            println!("{}", Summary::of(&history));
            let violations = check(&history);
            for violation in &violations {
                println!("{violation}");
            }
            if !violations.is_empty() {
                return Ok(ExitCode::FAILURE);
            }
            println!("no contradiction");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows which there are.
fn names<'a>(mutants: impl IntoIterator<Item = &'a Mutant>) {
    for mutant in mutants {
        println!("{}", mutant.name);
    }
}

/// Runs each until one of its invariants catches it; what is sound, none ever must.
async fn mutants(chosen: &[&Mutant], seeds: u64, time: Duration) -> Result<ExitCode, Failure> {
    let mut code = ExitCode::SUCCESS;
    for mutant in chosen {
        let mut caught = None;
        let seeds = if mutant.is_sound() {
            seeds.div_ceil(2)
        } else {
            seeds
        };
        for seed in 1..=seeds {
            let history = mutant.run(seed, time).await?;
            let directory = default_directory().join(mutant.name.replace(' ', "-"));
            match verdict(&history, &directory) {
                Ok(_) if mutant.is_sound() => {}
                Ok(_) => drop(save(&history, &directory)?),
                Err(contradiction) => {
                    let enough = mutant.is_sound() || mutant.is_caught(&contradiction.violations);
                    caught = Some(contradiction);
                    if enough {
                        break;
                    }
                }
            }
        }
        let good = match &caught {
            None => mutant.is_sound(),
            Some(caught) => mutant.is_caught(&caught.violations),
        };
        if !good {
            code = ExitCode::FAILURE;
        }
        let word = if good { "ok  " } else { "FAIL" };
        match caught {
            None => println!("{word} {}: not caught", mutant.name),
            Some(caught) if !mutant.is_sound() => {
                let by = caught.by_invariant();
                let by = by.iter().map(|(name, count)| format!("{name} ({count})"));
                let by: Vec<_> = by.collect();
                let must = match good {
                    true => String::new(),
                    false => format!(", and not by {}", mutant.caught_by.join(" or ")),
                };
                println!(
                    "{word} {}: caught by {}, seed {}{must}",
                    mutant.name,
                    by.join(", "),
                    caught.seed
                );
            }
            Some(caught) => println!("{word} {}: {caught}", mutant.name),
        }
    }
    Ok(code)
}
