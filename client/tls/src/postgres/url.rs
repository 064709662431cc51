//! What a database's URL says of TLS.

use percent_encoding::percent_decode_str;
use tokio_postgres::{Config, config::Host, config::SslMode};

use super::PostgresTls;
use crate::{
    client::{ClientTls, Roots, Trust},
    files::{BadFile, PemFile},
};

/// Why a URL was refused. Says nothing of what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadUrl {
    /// The driver cannot read it.
    #[error("the database URL is malformed (expected postgresql://user@host:port/name)")]
    Malformed,
    /// A parameter that neither we nor the driver know, counted from one.
    #[error("the database URL: its parameter number {0} is not supported")]
    Parameter(usize),
    /// A host or a database with an `@`, which belongs to the password.
    #[error("the database URL has one @ too many: in a password it is written %40")]
    At,
    /// Nobody to connect to.
    #[error("the database URL names no host")]
    NoHost,
    /// Another mode than libpq's.
    #[error("sslmode must be disable, prefer, require, verify-ca or verify-full")]
    Mode,
    /// Nothing to verify with.
    #[error("sslmode=verify-ca and verify-full need sslrootcert: a file, or system")]
    NoRoots,
    /// The machine's roots sign for everybody.
    #[error("sslrootcert=system needs sslmode=verify-full")]
    AnybodysRoots,
    /// A certificate without its key, or a key without its certificate.
    #[error("sslcert and sslkey go together")]
    HalfAnIdentity,
    /// A file that cannot be used.
    #[error("the database URL: {0}")]
    File(#[from] BadFile),
}

/// What the driver is told, and how TLS is made. Reads the files, to refuse what
/// cannot be used before anything is connected.
///
/// # Errors
///
/// When it is not a URL and not a list of libpq's keywords either, or its
/// parameters of TLS cannot be used.
pub fn parse(url: &str) -> Result<(Config, PostgresTls), BadUrl> {
    let url = url.trim();
    let (rest, ours) = split(url)?;
    let mut config: Config = rest.parse().map_err(|_| BadUrl::Malformed)?;
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        return Err(BadUrl::NoHost);
    }
    let hosts = config.get_hosts();
    let has_at = |host: &Host| matches!(host, Host::Tcp(name) if name.contains('@'));
    if scheme(url).is_some()
        && (hosts.iter().any(has_at) || config.get_dbname().is_some_and(|db| db.contains('@')))
    {
        return Err(BadUrl::At);
    }
    let only_sockets = !hosts.is_empty() && hosts.iter().all(|host| matches!(host, Host::Unix(_)));
    let tls = ours.judge(only_sockets, &mut config)?;
    Ok((config, tls))
}

/// The parameters that the driver knows, without those of ours.
const DRIVERS: [&str; 18] = [
    "user",
    "password",
    "dbname",
    "options",
    "application_name",
    "sslnegotiation",
    "host",
    "hostaddr",
    "port",
    "connect_timeout",
    "tcp_user_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_retries",
    "target_session_attrs",
    "channel_binding",
    "load_balance_hosts",
];

/// The parameters that are ours.
#[derive(Debug, Default)]
struct Ours {
    mode: Option<String>,
    roots: Option<String>,
    certificate: Option<String>,
    key: Option<String>,
}

impl Ours {
    /// Takes what is its own; an empty value is none, as for libpq.
    fn takes(&mut self, key: &str, value: &str) -> bool {
        let place = match key {
            "sslmode" => &mut self.mode,
            "sslrootcert" => &mut self.roots,
            "sslcert" => &mut self.certificate,
            "sslkey" => &mut self.key,
            _ => return false,
        };
        *place = (!value.is_empty()).then(|| value.to_owned());
        true
    }

    fn judge(self, only_sockets: bool, config: &mut Config) -> Result<PostgresTls, BadUrl> {
        let roots = self.roots.map(|path| match path.as_str() {
            "system" => Roots::System,
            path => Roots::File(PemFile::new("sslrootcert", path)),
        });
        let mode = self.mode.as_deref().unwrap_or(match roots {
            Some(Roots::System) => "verify-full",
            _ => "prefer",
        });
        let (driver, trust) = match (mode, roots) {
            ("disable", _) => (SslMode::Disable, Trust::Anybody),
            ("verify-full", Some(roots)) => (SslMode::Require, Trust::Name(roots)),
            ("prefer" | "require" | "verify-ca", Some(Roots::System)) => {
                return Err(BadUrl::AnybodysRoots);
            }
            ("require" | "verify-ca", Some(roots)) => (SslMode::Require, Trust::Chain(roots)),
            ("verify-ca" | "verify-full", None) => return Err(BadUrl::NoRoots),
            ("require", None) => (SslMode::Require, Trust::Anybody),
            ("prefer", _) => (SslMode::Prefer, Trust::Anybody),
            _ => return Err(BadUrl::Mode),
        };
        let identity = match (self.certificate, self.key) {
            (Some(certificate), Some(key)) => Some((
                PemFile::new("sslcert", certificate),
                PemFile::new("sslkey", key),
            )),
            (None, None) => None,
            _ => return Err(BadUrl::HalfAnIdentity),
        };
        if driver == SslMode::Disable || only_sockets {
            config.ssl_mode(SslMode::Disable);
            return Ok(PostgresTls::new(None, false));
        }
        config.ssl_mode(driver);
        let client = ClientTls::new(trust, identity, &[b"postgresql"])?;
        Ok(PostgresTls::new(Some(client), driver == SslMode::Prefer))
    }
}

/// What a URL begins with. None is a list of keywords.
fn scheme(url: &str) -> Option<&'static str> {
    ["postgres://", "postgresql://"]
        .into_iter()
        .find(|scheme| url.starts_with(scheme))
}

/// The URL without our parameters, and these.
fn split(url: &str) -> Result<(String, Ours), BadUrl> {
    let mut ours = Ours::default();
    let rest = match scheme(url) {
        Some(scheme) => {
            // A password may hold a question mark, so the driver looks for the first
            // `@` first.
            let after = url[scheme.len()..]
                .find('@')
                .map_or(0, |at| at + scheme.len());
            match url[after..].find('?') {
                Some(at) => {
                    let (address, query) = url.split_at(after + at);
                    let query = without_ours(&query[1..], &mut ours)?;
                    format!("{address}?{query}")
                }
                None => url.to_owned(),
            }
        }
        None => keywords_without_ours(url, &mut ours)?,
    };
    Ok((rest, ours))
}

fn without_ours(query: &str, ours: &mut Ours) -> Result<String, BadUrl> {
    let mut rest = Vec::new();
    for (at, pair) in query.split('&').enumerate() {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decode = |text| {
            let text = percent_decode_str(text).decode_utf8();
            text.map_err(|_| BadUrl::Malformed)
        };
        let key = decode(key)?;
        if ours.takes(&key, &decode(value)?) {
            continue;
        }
        if !key.is_empty() && !DRIVERS.contains(&key.as_ref()) {
            return Err(BadUrl::Parameter(at + 1));
        }
        rest.push(pair);
    }
    Ok(rest.join("&"))
}

/// Of `key = value` pairs, in which a value may be in quotes.
fn keywords_without_ours(text: &str, ours: &mut Ours) -> Result<String, BadUrl> {
    let mut rest = String::new();
    let mut left = text.trim_start();
    let mut at = 0;
    while !left.is_empty() {
        at += 1;
        let (key, after) = left.split_once('=').ok_or(BadUrl::Malformed)?;
        let key = key.trim_end();
        let (value, after) = value(after.trim_start())?;
        if !ours.takes(key, &value) {
            if !DRIVERS.contains(&key) {
                return Err(BadUrl::Parameter(at));
            }
            let quoted = value.replace('\\', "\\\\").replace('\'', "\\'");
            rest.push_str(&format!("{key}='{quoted}' "));
        }
        left = after.trim_start();
    }
    Ok(rest)
}

/// A value, unquoted, and what follows it.
fn value(text: &str) -> Result<(String, &str), BadUrl> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut letters = text.char_indices().skip(usize::from(quoted));
    while let Some((at, letter)) = letters.next() {
        match letter {
            '\\' => value.push(letters.next().ok_or(BadUrl::Malformed)?.1),
            '\'' if quoted => return Ok((value, &text[at + 1..])),
            letter if !quoted && letter.is_whitespace() => return Ok((value, &text[at..])),
            letter => value.push(letter),
        }
    }
    if quoted {
        return Err(BadUrl::Malformed);
    }
    Ok((value, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(url: &str) -> Result<SslMode, BadUrl> {
        parse(url).map(|(config, _)| config.get_ssl_mode())
    }

    #[test]
    fn what_is_ours_is_taken_out() {
        let rest = |text| split(text).map(|(rest, _)| rest);
        let url = "postgresql://u:p?w@h:1,i:2/d?sslmode=verify-full&connect_timeout=3&sslrootcert=%2Ftmp%2Fa%20b";
        assert_eq!(
            rest(url).unwrap(),
            "postgresql://u:p?w@h:1,i:2/d?connect_timeout=3"
        );
        let (_, ours) = split(url).unwrap();
        assert_eq!(ours.mode.as_deref(), Some("verify-full"));
        assert_eq!(ours.roots.as_deref(), Some("/tmp/a b"));
        let words = r"host = h sslkey='/a b' password='it\'s \\ sslmode=disable' sslcert=/c";
        let (rest, ours) = split(words).unwrap();
        assert_eq!(rest, r"host='h' password='it\'s \\ sslmode=disable' ");
        assert_eq!(ours.mode, None);
        assert_eq!(ours.key.as_deref(), Some("/a b"));
        assert_eq!(ours.certificate.as_deref(), Some("/c"));
        let password = parse(r"host=h password='it\'s \\ sslmode=disable'")
            .unwrap()
            .0;
        let password = password.get_password().unwrap();
        assert_eq!(password, br"it's \ sslmode=disable");
    }

    #[test]
    fn the_drivers_parameters_are_known_to_it() {
        for key in DRIVERS {
            let error = format!("{key}=''").parse::<Config>().err();
            let said = error.map(|error| format!("{error:?}")).unwrap_or_default();
            assert!(!said.contains("Unknown"), "{key}: {said}");
        }
        let unknown = "nonsense=''".parse::<Config>().unwrap_err();
        assert!(format!("{unknown:?}").contains("Unknown"), "{unknown:?}");
    }

    #[test]
    fn modes_are_libpqs() {
        assert_eq!(mode("postgresql://h/d"), Ok(SslMode::Prefer));
        assert_eq!(
            mode("postgresql://h/d?sslmode=disable"),
            Ok(SslMode::Disable)
        );
        assert_eq!(mode("host=h sslmode=require"), Ok(SslMode::Require));
        assert_eq!(mode("host=/run sslmode=require"), Ok(SslMode::Disable));
        assert_eq!(mode("host=h sslmode=allow"), Err(BadUrl::Mode));
        assert_eq!(mode("host=h sslmode=verify-ca"), Err(BadUrl::NoRoots));
        assert_eq!(mode("host=h sslmode='verify-full'"), Err(BadUrl::NoRoots));
        assert_eq!(
            mode("host=h sslmode=require sslrootcert=system"),
            Err(BadUrl::AnybodysRoots)
        );
        assert_eq!(mode("host=h sslcert=/c"), Err(BadUrl::HalfAnIdentity));
        assert_eq!(mode("postgresql:///d?sslmode=disable"), Err(BadUrl::NoHost));
        assert_eq!(mode("host='h"), Err(BadUrl::Malformed));
        assert_eq!(
            mode("postgresql://u@h/d?connect_timeout=3&sslrotcert=/c"),
            Err(BadUrl::Parameter(2))
        );
        assert_eq!(mode("host=h gssencmode=disable"), Err(BadUrl::Parameter(2)));
        for url in ["postgresql://u:se@cret@h/d", "postgresql://u:se@c/ret@h/d"] {
            assert_eq!(mode(url), Err(BadUrl::At), "{url}");
        }
        assert_eq!(mode("postgresql://u:se%40cret@h/d"), Ok(SslMode::Prefer));
        let missing = mode("postgresql://u:secret@h/d?sslmode=verify-full&sslrootcert=/not/there");
        assert_eq!(
            missing.unwrap_err().to_string(),
            "the database URL: sslrootcert cannot be read: entity not found"
        );
    }
}
