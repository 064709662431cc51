//! A stub of an object store over HTTP: one object a path, an ETag made from the
//! content as S3's is, `If-Match` and `If-None-Match: *` on PUT. Three paths
//! answer as no store should that one fences with.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// Answers 403 to everything.
pub(crate) const FORBIDDEN: &str = "/bucket/forbidden";

/// There, with an ETag that no condition matches.
pub(crate) const WEAK: &str = "/bucket/weak";

/// In a bucket that is not there.
pub(crate) const NOWHERE: &str = "/no-bucket/key";

/// What is stored, as the recipe writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) token: i64,
    pub(crate) body: String,
}

fn content(token: i64, body: &str) -> String {
    format!("fencing-token: {token}\n{body}")
}

/// The same for the same content, whoever wrote it.
fn etag(content: &str) -> String {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    format!("\"{:x}\"", hasher.finish())
}

#[derive(Debug, Default)]
struct Contents {
    objects: HashMap<String, String>,
    /// Written right after the next GET was answered: somebody who comes between.
    after_next_get: Option<String>,
    refused: u32,
}

/// A running stub. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct ObjectStub {
    address: SocketAddr,
    contents: Arc<Mutex<Contents>>,
    _task: JoinSet<()>,
}

impl ObjectStub {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let contents = Arc::<Mutex<Contents>>::default();
        let shared = Arc::clone(&contents);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
                while connections.try_join_next().is_some() {}
            }
        });
        Self {
            address,
            contents,
            _task: task,
        }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Writes without a condition, as one who does not know the rules.
    pub(crate) fn put(&self, path: &str, body: &str, token: i64) {
        let mut contents = self.contents.lock().unwrap();
        contents
            .objects
            .insert(path.to_owned(), content(token, body));
    }

    /// Writes right after the next GET was answered.
    pub(crate) fn put_after_next_get(&self, body: &str, token: i64) {
        self.contents.lock().unwrap().after_next_get = Some(content(token, body));
    }

    pub(crate) fn object(&self, path: &str) -> Object {
        let contents = self.contents.lock().unwrap();
        let (line, body) = contents.objects[path].split_once('\n').unwrap();
        let token = line
            .strip_prefix("fencing-token: ")
            .unwrap()
            .parse()
            .unwrap();
        let body = body.to_owned();
        Object { token, body }
    }

    /// How many conditions did not hold.
    pub(crate) fn refused(&self) -> u32 {
        self.contents.lock().unwrap().refused
    }
}

async fn serve(mut stream: TcpStream, contents: Arc<Mutex<Contents>>) {
    let mut bytes = Vec::new();
    let (head, body) = loop {
        if stream.read_buf(&mut bytes).await.unwrap() == 0 {
            return;
        }
        let text = String::from_utf8(bytes.clone()).unwrap();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = header(head, "content-length").map_or(0, |length| length.parse().unwrap());
        if body.len() >= length {
            break (head.to_owned(), body.to_owned());
        }
    };
    let answer = answer(&head, body, &mut contents.lock().unwrap());
    stream.write_all(answer.as_bytes()).await.unwrap();
}

fn answer(head: &str, body: String, contents: &mut Contents) -> String {
    let mut words = head.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    match path {
        FORBIDDEN => return response("403 Forbidden", "", "no"),
        NOWHERE => return response("404 Not Found", "", "no"),
        WEAK => return response("200 OK", "ETag: W/\"1\"\r\n", ""),
        _ => {}
    }
    let found = contents.objects.get(path).cloned();
    if method == "GET" {
        if let Some(content) = contents.after_next_get.take() {
            contents.objects.insert(path.to_owned(), content);
        }
        return match found {
            Some(content) => {
                let headers = format!("ETag: {}\r\n", etag(&content));
                response("200 OK", &headers, &content)
            }
            None => response("404 Not Found", "", ""),
        };
    }
    assert_eq!(method, "PUT", "{head}");
    let etag = found.map(|content| etag(&content));
    let holds = match (header(head, "if-match"), header(head, "if-none-match")) {
        (Some(expected), None) => etag.as_deref() == Some(expected),
        (None, Some("*")) => etag.is_none(),
        (None, None) => true,
        _ => panic!("{head}"),
    };
    if !holds {
        contents.refused += 1;
        return response("412 Precondition Failed", "", "");
    }
    contents.objects.insert(path.to_owned(), body);
    response("200 OK", "", "")
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().skip(1).find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then_some(value.trim())
    })
}

fn response(status: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}
