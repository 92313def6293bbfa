"""A frontend that answers like Dynamo's and fails in one named way. Usage: frontend.py HOST PORT MODE; DYN_NAMESPACE names the namespace.

MODE: ready, sse_error (200 and an error event on every completion), hang (never answers a completion), never_ready (one decode worker is
missing for ever).
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading


class Handler(http.server.BaseHTTPRequestHandler):
    mode = "ready"

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: str, kind: str = "application/json") -> None:
        payload = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        if self.path == "/live":
            self.reply(200, "{}")
        elif self.path.endswith("/ready"):
            types = {"prefill": {"workers": 1}, "decode": {"workers": 0 if self.mode == "never_ready" else 1}}
            ready = self.mode != "never_ready"
            namespaces = {os.environ["DYN_NAMESPACE"]: {"ready": ready, "worker_types": types}}
            self.reply(200 if ready else 503, json.dumps({"ready": ready, "namespaces": namespaces}))
        else:
            self.reply(200, 'dynamo_frontend_inflight_requests{model="recall"} 0\n', "text/plain")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.mode == "hang":
            threading.Event().wait(3600)
        if self.mode == "sse_error":
            self.reply(200, 'event: error\ndata: {"message": "KV load failure"}\n\ndata: [DONE]\n\n', "text/event-stream")
            return
        chunk = {"choices": [{"index": 0, "delta": {"content": "AAAA1111"}, "finish_reason": "stop"}]}
        self.reply(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream")


if __name__ == "__main__":
    Handler.mode = sys.argv[3]
    http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
