#!/usr/bin/env python3
"""Fencing for an object store that has conditional writes (S3, GCS, Azure, MinIO).

    object_store.py URL TOKEN claim         show the token, and print the object
    object_store.py URL TOKEN append TEXT   append a line

Exit codes: 0 done, 76 a newer holder has been here: stop.

The token is the first line of the object, so that one write changes both:

    read   token, body and ETag                         GET
    check  is the stored token newer than mine? stop
    write  my token and the body, if the ETag stands    PUT, If-Match
    else   from the start

Comparing the token is not enough without If-Match: between the read and the
write a newer holder may have written, and a plain PUT would overwrite it. The
condition makes the comparison and the write one step, because whatever happened
in between has changed the ETag. A new object takes If-None-Match: *.

The token must not be in the metadata: S3's ETag is made from the content alone,
so a newer holder that writes the same content with its own token would leave
the ETag, and with it an older holder's condition, as they were.

A new holder claims first: it writes what is there with its own token. From then
on no older holder's condition holds, and what it reads is final. Never delete a
fenced object, since its token goes with it: write an empty one.

With boto3 (real S3 wants signed requests) the two calls are
    got = s3.get_object(Bucket=b, Key=k)     # got["ETag"], got["Body"]
    s3.put_object(Bucket=b, Key=k, Body=line + body, IfMatch=got["ETag"])
A 412, and S3's 409 ConditionalRequestConflict, mean: from the start.
"""

import http.client
import sys
import urllib.parse

TOKEN = b"fencing-token: "


class Stale(Exception):
    """A newer holder has been here: stop working."""


class Store:
    """One object, over plain HTTP. Swap in your own client here."""

    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        self.address, self.path = parts.netloc, parts.path

    def _call(self, method, body=None, headers=None):
        connection = http.client.HTTPConnection(self.address, timeout=10)
        try:
            connection.request(method, self.path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def read(self):
        """Body, token and ETag; ETag is None for an object that is not there."""
        status, headers, body = self._call("GET")
        if status == 404:
            return b"", 0, None
        if status != 200:
            raise RuntimeError(f"GET: {status}")
        line, _, rest = body.partition(b"\n")
        if not line.startswith(TOKEN):
            # Written by others, it has none.
            return body, 0, headers["ETag"]
        # As a number: as text "9" is above "10".
        return rest, int(line.removeprefix(TOKEN)), headers["ETag"]

    def write_if_unchanged(self, body, token, etag):
        """Whether the object was still the one that was read."""
        condition = {"If-None-Match": "*"} if etag is None else {"If-Match": etag}
        content = TOKEN + str(token).encode() + b"\n" + body
        status, _, _ = self._call("PUT", content, condition)
        # 404: S3's answer to If-Match on an object that has gone.
        if status in (404, 409, 412):
            return False
        if status not in (200, 201, 204):
            raise RuntimeError(f"PUT: {status}")
        return True


def fenced_update(store, token, change):
    """Writes change(body) with this token, and returns what was written.

    After a lost answer, calling it again is safe for the fence, but `change` may
    be applied twice: let it look for its own trace when that matters.
    """
    if token <= 0:
        raise ValueError("not a fencing token")
    while True:
        body, seen, etag = store.read()
        if seen > token:
            raise Stale(f"token {token} is older than {seen}")
        body = change(body)
        if store.write_if_unchanged(body, token, etag):
            return body


def main(url, token, verb, text=""):
    store, token = Store(url), int(token)
    if verb == "claim":
        sys.stdout.write(fenced_update(store, token, lambda body: body).decode())
    elif verb == "append":
        fenced_update(store, token, lambda body: body + text.encode() + b"\n")
    else:
        raise SystemExit(64)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Stale as stale:
        print(f"stale: {stale}", file=sys.stderr)
        sys.exit(76)
