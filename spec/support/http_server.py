"""An HTTP server that behaves well or badly, as a spec wants it.

    http_server.py NAME=KIND...

starts one listener on 127.0.0.1 for each argument and prints `listening NAME PORT`. KIND is

    plain            HTTP
    tls:FILE         HTTPS; FILE holds certificate and key
    silent           accepts connections and never says a word
    full             a listener whose queue is full, so that connecting to it takes for ever
    PORT             as plain, on that port

What a spec waits for is printed as it happens: `accepted NAME N`, `request NAME METHOD PATH`,
`closed PATH` when the client went away before the end. The paths are the methods of Handler whose
names begin with `at_`.
"""

import gzip
import http.server
import json
import select
import socket
import socketserver
import ssl
import sys
import threading
import time
import urllib.parse
import zlib

printing = threading.Lock()
gate = threading.Event()


def say(*words):
    with printing:
        print(*words, flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def setup(self):
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def read_body(self):
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            body = b""
            while True:
                size = int(self.rfile.readline(), 16)
                body += self.rfile.read(size)
                self.rfile.readline()
                if size == 0:
                    return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_any(self):
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.body = self.read_body()
        say("request", self.server.name, self.command, self.path)
        name = url.path.strip("/").replace("-", "_") or "echo"
        action = getattr(self, "at_" + name, None)
        if action is None:
            return self.answer(404, b"no such path")
        try:
            action()
        except (BrokenPipeError, ConnectionResetError):
            say("closed", url.path)
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = handle_any

    def answer(self, status, body=b"", headers=()):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), [("Content-Type", "application/json")])

    def client_is_gone(self, secs):
        """Wait so long, or until the client closes the connection."""
        readable, _, _ = select.select([self.connection], [], [], secs)
        if not readable:
            return False
        try:
            return self.connection.recv(1) == b""
        except OSError:
            return True

    # ---- what a request looks like when it arrives ----

    def at_echo(self):
        self.answer_json({
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): self.headers.get_all(name) for name in self.headers},
            "body": self.body.decode("latin-1"),
            "port": self.server.server_address[1],
        })

    def at_mirror(self):
        self.answer(200, self.body, [("Content-Type", "application/octet-stream")])

    def at_accepted(self):
        self.answer(200, str(self.server.accepted).encode())

    # ---- replies ----

    def at_shipments(self):
        """The service of docs/handlers.md: an order that is a number is answered with that status."""
        order = json.loads(self.body)["order"]
        if isinstance(order, int):
            return self.answer(order, b"no", [("Retry-After", "7")] if order == 429 else [])
        self.answer_json({"tracking": self.headers["Idempotency-Key"] + " " + self.headers["Authorization"]})

    def at_refunds(self):
        """The bank of docs/handlers.md: the same key gives the same refund."""
        say("refunded", json.loads(self.body)["charge"])
        self.answer_json({"id": "r-" + self.headers["Idempotency-Key"]})

    def at_status(self):
        self.answer(int(self.query["is"]), b"said", [("Retry-After", "7")])

    def at_bytes(self):
        self.answer(200, bytes(range(256)) * 3)

    def at_json(self):
        self.answer(200, self.query["text"].encode(), [("Content-Type", "application/json")])

    def at_headers(self):
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\nX-Mixed-Case: one\r\nx-twice: a\r\nX-TWICE:b \r\nX-Empty:\r\n"
            b"X-Folded: first\r\n  second\r\nSet-Cookie: a=1; Path=/\r\nset-cookie: b=2, c\r\n"
            b"Content-Length: 0\r\n\r\n")

    def at_early(self):
        """Two replies before the one that counts."""
        self.wfile.write(
            b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        self.answer(200, b"late")

    def at_chunked(self):
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Trailer\r\n\r\n"
            b"5\r\nhello\r\n7\r\n, world\r\n0\r\nX-Trailer: late\r\n\r\n")

    def at_gzip(self):
        self.answer(200, gzip.compress(b"packed " * 1000), [("Content-Encoding", "gzip")])

    def at_deflate(self):
        self.answer(200, zlib.compress(b"packed " * 1000), [("Content-Encoding", "deflate")])

    def at_not_gzip(self):
        self.answer(200, b"this is no gzip at all", [("Content-Encoding", "gzip")])

    def at_redirect(self):
        """As often as `left` says, then /echo."""
        left = int(self.query["left"])
        target = f"/redirect?left={left - 1}" if left > 1 else "/echo"
        self.answer(302, b"moved", [("Location", target)])

    def at_redirect_to(self):
        self.answer(int(self.query.get("status", 302)), b"moved", [("Location", self.query["url"])])

    def at_circle(self):
        self.answer(302, b"moved", [("Location", "/circle")])

    # ---- slow ones ----

    def at_slow(self):
        if self.client_is_gone(float(self.query["secs"])):
            say("closed", "/slow")
            self.close_connection = True
            return
        self.answer(200, self.query.get("say", "slow").encode())

    def at_gate(self):
        """Not before /open was asked for."""
        gate.wait(600)
        self.answer(200, self.query["say"].encode())

    def at_open(self):
        gate.set()
        self.answer(200)

    def at_hang(self):
        say("hanging")
        if self.client_is_gone(600):
            say("closed", "/hang")
        self.close_connection = True

    def at_drip(self):
        """A byte now and then, for ever."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not self.client_is_gone(0.02):
            self.wfile.write(b"x")
        say("closed", "/drip")
        self.close_connection = True

    def at_drip_header(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.client_is_gone(0.02):
            self.wfile.write(b"x")
        say("closed", "/drip-header")
        self.close_connection = True

    # ---- large ones ----

    def flood(self, piece, header):
        self.wfile.write(header)
        sent = 0
        try:
            while sent < 1 << 30:
                self.wfile.write(piece)
                sent += len(piece)
        finally:
            say("flooded", sent)

    def at_large(self):
        self.flood(bytes(65536), b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 30))

    def at_large_chunked(self):
        self.flood(b"10000\r\n" + bytes(65536) + b"\r\n",
                   b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    def at_bomb(self):
        """64 MiB of zeros in 64 KiB."""
        self.answer(200, gzip.compress(bytes(64 << 20)), [("Content-Encoding", "gzip")])

    def at_exactly(self):
        self.answer(200, b"x" * int(self.query["bytes"]))

    def at_large_header(self):
        self.flood(b"X-Line: " + b"x" * 60000 + b"\r\n", b"HTTP/1.1 200 OK\r\n")

    # ---- broken ones ----

    def at_cut(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
        self.close_connection = True

    def at_nothing(self):
        self.close_connection = True

    def at_reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
        self.wfile.flush()
        self.connection.close()
        self.close_connection = True

    def at_garbage(self):
        self.wfile.write(b"hello there\r\n\r\n")
        self.close_connection = True

    def at_leave(self):
        """Answer, and close the connection a moment later without saying so before."""
        self.answer(200, b"bye")
        self.close_connection = True


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, name, port, context):
        self.name = name
        self.accepted = 0
        super().__init__(("127.0.0.1", port), Handler)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def get_request(self):
        accepted = super().get_request()
        self.accepted += 1
        say("accepted", self.name, self.accepted)
        return accepted

    def handle_error(self, request, client_address):
        say("failed", self.name, sys.exc_info()[1])


def serve(name, port, context):
    server = Server(name, port, context)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def listen(backlog):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(backlog)
    kept.append(listener)
    return listener.getsockname()[1]


def fill(port):
    """Connect until no connection is made any more."""
    for _ in range(64):
        client = socket.socket()
        client.setblocking(False)
        kept.append(client)
        client.connect_ex(("127.0.0.1", port))
        if not select.select([], [client], [], 0.3)[1]:
            return


kept = []


def start(name, kind):
    if kind == "plain":
        return serve(name, 0, None)
    if kind.isdigit():
        return serve(name, int(kind), None)
    if kind.startswith("tls:"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(kind[len("tls:"):])
        return serve(name, 0, context)
    port = listen(1024 if kind == "silent" else 0)
    if kind == "full":
        fill(port)
    return port


for argument in sys.argv[1:]:
    listener_name, listener_kind = argument.split("=", 1)
    say("listening", listener_name, start(listener_name, listener_kind))
while True:
    time.sleep(3600)
