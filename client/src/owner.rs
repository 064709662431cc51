//! The owner when none is named: `<host>-<pid>-<random>`.
//!
//! An owner must name one holder. Host and PID are for the people who read it;
//! the random part makes it one holder, since containers share both.

use uuid::Uuid;

/// In characters of up to 4 bytes: leaves room for the rest within the 256
/// bytes of an owner.
const MAX_HOST: usize = 50;

/// A name for a new holder that nobody else has: `<host>-<pid>-<random>`.
#[must_use]
pub fn unique() -> String {
    let uname = rustix::system::uname();
    let random = Uuid::new_v4().simple().to_string();
    let host = host(&uname.nodename().to_string_lossy());
    format!("{host}-{}-{:.12}", std::process::id(), random)
}

/// What an owner may contain of the host's name.
fn host(name: &str) -> String {
    let host: String = name
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_HOST)
        .collect();
    if host.is_empty() {
        "host".to_owned()
    } else {
        host
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_process_is_a_holder_of_its_own() {
        assert_ne!(unique(), unique());
        assert!(unique().contains(&format!("-{}-", std::process::id())));
    }

    #[test]
    fn odd_host_names_still_make_owners() {
        assert_eq!(host("web1"), "web1");
        assert_eq!(host("we\nb\u{7f}1"), "web1");
        assert_eq!(host(""), "host");
        assert!(host(&"🧀".repeat(255)).len() <= 200);
    }
}
