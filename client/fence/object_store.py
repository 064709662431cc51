#!/usr/bin/env python3
"""Fencing for an object store with conditional writes, such as S3 or MinIO.

    object_store.py URL TOKEN claim         show the token, and print the object
    object_store.py URL TOKEN append TEXT   append a line

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
A 412, and S3's 409 ConditionalRequestConflict, mean: from the start. For stores
that want the condition otherwise, see the README: only S3's way is tested.
"""

import argparse
import http.client
import random
import sys
import time
import urllib.parse

TOKEN = b"fencing-token: "

EXIT_CODES = """\
exit codes:
  0   done
  64  wrong usage
  69  no store, or an answer that is of no use; a write may have happened all the same
  76  a newer holder has been here: stop
"""


class Stale(Exception):
    """A newer holder has been here: stop working."""


class Store:
    """One object, over HTTP without signatures. Swap in your own client here."""

    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or len(parts.path) < 2:
            raise ValueError("expected http(s)://host[:port]/path/of/the/object")
        tls = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self.host, self.port = parts.hostname, parts.port
        # A query may be the signature.
        self.path = urllib.parse.urlunsplit(("", "", parts.path, parts.query, ""))

    def _call(self, method, body=None, headers=None):
        connection = self._connection(self.host, self.port, timeout=10)
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
            raise RuntimeError(f"GET was answered with {status}")
        etag = headers["ETag"]
        if not etag or etag.startswith("W/"):
            # No condition on it would ever hold.
            raise RuntimeError("GET was answered without a strong ETag")
        line, _, rest = body.partition(b"\n")
        if not line.startswith(TOKEN):
            # Written by others, it has none.
            return body, 0, etag
        # As a number: as text "9" is above "10".
        return rest, int(line.removeprefix(TOKEN)), etag

    def write_if_unchanged(self, body, token, etag):
        """Whether the object was still the one that was read."""
        condition = {"If-None-Match": "*"} if etag is None else {"If-Match": etag}
        content = TOKEN + str(token).encode() + b"\n" + body
        status, _, _ = self._call("PUT", content, condition)
        # 404: S3's answer to If-Match on an object that has gone. Without If-Match
        # there is nothing to put it into, and never will be.
        if status in (409, 412) or (status == 404 and etag is not None):
            return False
        if status not in (200, 201, 204):
            raise RuntimeError(f"PUT was answered with {status}")
        return True


def fenced_update(store, token, change):
    """Writes change(body) with this token, and returns what was written.

    After a lost answer, calling it again is safe for the fence, but `change` may
    be applied twice: let it look for its own trace when that matters.
    """
    if not 0 < token < 2**53:
        raise ValueError("not a fencing token")
    while True:
        body, seen, etag = store.read()
        if seen > token:
            raise Stale(f"token {token} is older than {seen}")
        body = change(body)
        if store.write_if_unchanged(body, token, etag):
            return body
        # Others write as well: not in step with them.
        time.sleep(random.uniform(0, 0.1))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(64, f"{self.prog}: {message}\n")


def arguments():
    def store(url):
        try:
            return Store(url)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    def token(text):
        if not text.isdecimal() or not 0 < int(text) < 2**53:
            raise argparse.ArgumentTypeError("not a fencing token: it is from 1 to 2^53 - 1")
        return int(text)

    parser = Parser(
        description="Write an object so that no older holder of a lock can overwrite it.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", metavar="URL", type=store, help="of the object, http or https")
    parser.add_argument("token", metavar="TOKEN", type=token, help="fencing_token of the lease")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("claim", help="show the token, and print the object: a new holder, first")
    verbs.add_parser("append", help="append a line").add_argument("text", metavar="TEXT")
    return parser.parse_args()


def main(store, token, verb, text=None):
    def change(body):
        return body if verb == "claim" else body + text.encode() + b"\n"

    try:
        body = fenced_update(store, token, change)
        if verb == "claim":
            sys.stdout.buffer.write(body)
            sys.stdout.buffer.flush()
    except Stale as stale:
        print(f"stale: {stale}", file=sys.stderr)
        return 76
    # ValueError: what was read or asked for is not what it should be.
    except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
        print(f"failed: {error or type(error).__name__}", file=sys.stderr)
        return 69
    return 0


if __name__ == "__main__":
    sys.exit(main(**vars(arguments())))
