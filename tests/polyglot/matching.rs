//! Names for what was answered, and what an answer must be like.

use std::{cmp::Ordering, collections::BTreeMap};

use serde_json::Value;

/// What `$name` stands for.
pub(crate) struct Names(BTreeMap<String, Value>);

impl Names {
    pub(crate) fn new(resource: &str) -> Self {
        Self(BTreeMap::from([("r".to_owned(), resource.into())]))
    }

    /// The same with values for names. A string that is a name and nothing else
    /// becomes the value; within a longer string stands its text.
    pub(crate) fn fill(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => {
                if let Some(value) = text.strip_prefix('$').and_then(|name| self.0.get(name)) {
                    return value.clone();
                }
                let mut text = text.clone();
                for (name, value) in &self.0 {
                    let plain = value
                        .as_str()
                        .map_or_else(|| value.to_string(), str::to_owned);
                    text = text.replace(&format!("${name}"), &plain);
                }
                text.into()
            }
            Value::Array(values) => values.iter().map(|value| self.fill(value)).collect(),
            Value::Object(fields) => {
                let fields = fields.iter();
                Value::Object(
                    fields
                        .map(|(key, value)| (key.clone(), self.fill(value)))
                        .collect(),
                )
            }
            other => other.clone(),
        }
    }

    /// Gives fields of an answer a name: `{"response.lock.owner": "o"}`.
    pub(crate) fn save(&mut self, saved: &Value, answer: &Value) -> Result<(), String> {
        for (path, name) in saved.as_object().into_iter().flatten() {
            let found = path.split('.').fold(answer, |value, key| &value[key]);
            if found.is_null() {
                return Err(format!("{answer} has no {path}"));
            }
            let name = name.as_str().ok_or("a name is a string")?;
            self.0.insert(name.to_owned(), found.clone());
        }
        Ok(())
    }
}

/// Every field that is expected must be there as it is expected.
pub(crate) fn expect(expected: &Value, answer: &Value) -> Result<(), String> {
    let Value::Object(fields) = expected else {
        // Numbers of 64 bits are strings in protobuf's JSON.
        let same = match (number(expected), number(answer)) {
            (Some(expected), Some(answer)) => expected == answer,
            _ => expected == answer,
        };
        return same
            .then_some(())
            .ok_or_else(|| format!("{answer} is not {expected}"));
    };
    for (key, expected) in fields {
        let holds = match key.as_str() {
            "above" => compare(answer, expected)?.is_gt(),
            "below" => compare(answer, expected)?.is_lt(),
            "not" => answer != expected,
            key => {
                expect(expected, &answer[key]).map_err(|why| format!("{key}: {why}"))?;
                true
            }
        };
        if !holds {
            return Err(format!("{answer} is not {key} {expected}"));
        }
    }
    Ok(())
}

fn compare(answer: &Value, expected: &Value) -> Result<Ordering, String> {
    let of = |value: &Value| number(value).ok_or_else(|| format!("{value} is no number"));
    Ok(of(answer)?.cmp(&of(expected)?))
}

fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}
