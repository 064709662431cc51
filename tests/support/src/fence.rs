//! A holder that writes: two tables in one transaction, fenced in one of three
//! ways. Used by the worker process that is frozen, and by the test that takes
//! over from it.

use std::str::FromStr;

use tokio_postgres::Error;

use crate::postgres::Client;

/// Two tables to be written, with a row for each of `count` resources.
pub const TABLES: &str = "
CREATE TABLE accounts (id int PRIMARY KEY, state text, fencing_token bigint NOT NULL DEFAULT 0);
CREATE TABLE journal (LIKE accounts INCLUDING ALL);
INSERT INTO accounts SELECT id, 'none' FROM generate_series(0, 199) AS id;
INSERT INTO journal TABLE accounts";

/// Guards both tables: the resource of row 7 is `NAME-7`.
pub fn guards(name: &str) -> String {
    let guard = |table: &str| {
        format!(
            "CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON {table}
             FOR EACH ROW EXECUTE FUNCTION fence.guard('{name}-', 'id');"
        )
    };
    guard("accounts") + &guard("journal")
}

/// What refuses the older token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `fence.admit` at the start of each transaction.
    Kit,
    /// `fence.guard` on the tables, and a writer that forgets to admit.
    Trigger,
    /// `WHERE fencing_token <= $t` in each statement.
    Plain,
}

impl Method {
    /// The word for it on a command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kit => "kit",
            Self::Trigger => "trigger",
            Self::Plain => "plain",
        }
    }
}

impl FromStr for Method {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        [Self::Kit, Self::Trigger, Self::Plain]
            .into_iter()
            .find(|method| method.as_str() == word)
            .ok_or_else(|| format!("no method {word:?}"))
    }
}

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Committed.
    Written,
    /// A statement found no row that it may write; rolled back.
    NoRow,
    /// Refused with this SQLSTATE.
    Refused(String),
}

/// One connection of a holder.
#[derive(Debug)]
pub struct Writer {
    client: Client,
    method: Method,
    isolation: String,
    name: String,
}

impl Writer {
    /// Connects. The resource of row 7 is `name-7`.
    ///
    /// # Errors
    ///
    /// When the database is away.
    pub async fn connect(
        url: &str,
        method: Method,
        isolation: &str,
        name: &str,
    ) -> Result<Self, Error> {
        Ok(Self {
            client: Client::connect(url).await?,
            method,
            isolation: isolation.to_owned(),
            name: name.to_owned(),
        })
    }

    /// What a new holder does first: shows its token, committed.
    pub async fn show(&self, id: i32, token: i64) -> Outcome {
        let statements = match self.method {
            Method::Kit | Method::Trigger => vec![self.admit(id, token)],
            Method::Plain => ["accounts", "journal"]
                .map(|table| {
                    format!(
                        "UPDATE {table} SET fencing_token = {token} WHERE id = {id} AND fencing_token <= {token}"
                    )
                })
                .into(),
        };
        self.transaction(&statements).await
    }

    /// Writes both tables, as a holder that knows the rules.
    pub async fn write(&self, id: i32, token: i64, state: &str) -> Outcome {
        let mut statements = self.updates(id, token, state);
        if self.method != Method::Plain {
            statements.insert(0, self.admit(id, token));
        }
        self.transaction(&statements).await
    }

    /// Writes both tables; where a trigger guards them, without an admit, so that
    /// the trigger alone stands in the way.
    pub async fn write_late(&self, id: i32, token: i64, state: &str) -> Outcome {
        match self.method {
            Method::Kit | Method::Plain => self.write(id, token, state).await,
            Method::Trigger => self.transaction(&self.updates(id, token, state)).await,
        }
    }

    fn admit(&self, id: i32, token: i64) -> String {
        format!("SELECT fence.admit('{}-{id}', {token})", self.name)
    }

    fn updates(&self, id: i32, token: i64, state: &str) -> Vec<String> {
        let condition = match self.method {
            Method::Kit | Method::Trigger => String::new(),
            Method::Plain => format!(" AND fencing_token <= {token}"),
        };
        ["accounts", "journal"]
            .map(|table| {
                format!("UPDATE {table} SET state = '{state}', fencing_token = {token} WHERE id = {id}{condition}")
            })
            .into()
    }

    /// Repeated for as long as the database asks for it.
    async fn transaction(&self, statements: &[String]) -> Outcome {
        loop {
            let outcome = self.attempt(statements).await;
            if !matches!(&outcome, Outcome::Refused(code) if code == "40001" || code == "40P01") {
                return outcome;
            }
        }
    }

    async fn attempt(&self, statements: &[String]) -> Outcome {
        let begin = format!("BEGIN ISOLATION LEVEL {}", self.isolation);
        self.client.run(&begin).await;
        for statement in statements {
            match self.client.execute(statement, &[]).await {
                Ok(1) => {}
                Ok(_) => {
                    self.client.run("ROLLBACK").await;
                    return Outcome::NoRow;
                }
                Err(error) => {
                    self.client.run("ROLLBACK").await;
                    return refused(&error);
                }
            }
        }
        match self.client.batch_execute("COMMIT").await {
            Ok(()) => Outcome::Written,
            Err(error) => refused(&error),
        }
    }
}

fn refused(error: &Error) -> Outcome {
    let code = error.code().map(|code| code.code().to_owned());
    Outcome::Refused(code.unwrap_or_else(|| error.to_string()))
}
