#!/usr/bin/env python3
"""Does the page of generate --serve work in a browser?

    python3 check_page.py URL [--screenshot FILE.png]        URL: of a server with --max-length 4000 and --ignore-eos

Types messages into the page in a headless Chromium (LLM_CHROMIUM, or the first of its names that is found), reads the answers as they
come, makes a conversation too long, and stops an answer.

Exit status: 0 all is well; 1 not; 77 (skipped) there is no Chromium.
"""

import argparse
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ["chromium", "chromium-headless-shell", "chromium-browser", "google-chrome"]


class Browser:
    """A page in Chromium, over its DevTools protocol: JSON texts that end with a zero byte, on the file descriptors 3 and 4."""

    def __init__(self, program, url, folder):
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --window-size=1280,860".split()

        def as_3_and_4():  # by way of numbers that are neither, and are not closed
            os.dup2(os.dup2(commands, 100), 3), os.dup2(os.dup2(answers, 101), 4)

        self.process = subprocess.Popen([program, *flags, f"--user-data-dir={folder}", "about:blank"], preexec_fn=as_3_and_4,
                                        close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands), os.close(answers)
        self.n_sent, self.came, self.session = 0, b"", {}
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method, **params):
        self.n_sent += 1
        os.write(self.commands, json.dumps({"id": self.n_sent, "method": method, "params": params, **self.session}).encode() + b"\0")
        while True:
            while b"\0" not in self.came:
                data = os.read(self.answers, 1 << 16)
                expect(data, "the browser has ended")
                self.came += data
            text, self.came = self.came.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self.n_sent:
                expect("error" not in answer, f"{method}: {answer}")
                return answer["result"]

    def value(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        expect("exceptionDetails" not in answer, f"{expression}: {answer}")
        return answer["result"].get("value")

    def becomes(self, expression, seconds=20):
        until = time.monotonic() + seconds
        while not self.value(expression):
            if time.monotonic() > until:
                fail(f"{expression} has not come true; the page shows: " + self.value("document.body.innerText"))
            time.sleep(0.02)

    def type_message(self, text):
        self.value("$('text').focus()")
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r" if kind == "keyDown" else "")


def fail(message):
    print(f"check_page: FAILED: {message}")
    sys.exit(1)


def expect(condition, message):
    if not condition:
        fail(message)


def check(page):
    page.becomes("document.readyState === 'complete' && typeof look === 'function' && last !== null")
    last_message = "[...document.querySelectorAll('.message')].at(-1).textContent"
    page.value("$('tokens').value = 40")
    page.type_message("Hello")
    page.becomes("messages.length === 2 && answering === null")
    expect(page.value(last_message).find("40 tokens, ") >= 0, "an answer without its note: " + page.value(last_message))
    page.becomes("$('rows').textContent === 'No requests.'")
    # A message that is too long by itself costs nothing of the conversation.
    page.type_message("z" * 5000)
    page.becomes(last_message + ".includes('5017 tokens') && answering === null")
    expect(page.value("messages.length === 2 && messages[0].content === 'Hello'"), "the conversation is gone")
    # With the first question and its answer this is more than the model has room for: they are left out.
    page.value("$('tokens').value = 3960")
    page.type_message("And?")
    page.becomes(last_message + ".length > 50 && $('running').textContent === '1' && cells.some(cell => cell[0] > 0)")
    expect(page.value("$('clear').disabled"), "the conversation can be cleared while an answer is written to it")
    page.value("$('pages').onmousemove({offsetX: 1, offsetY: 1})")
    expect(page.value("$('hover').textContent").startswith("page 0: "), "page 0 is not described")
    page.value("$('pages').onmousemove({offsetX: grid.columns * grid.size, offsetY: 1})")
    expect(page.value("$('hover').textContent") == "", "a page is described where none is drawn")
    share = float(page.value("$('owned').textContent").split("; ")[1].removesuffix(" % of their rows hold tokens"))
    expect(50 < share <= 100, f"{share} % of the pages' rows hold tokens")  # of one sequence all but the last page is full
    n = page.value(last_message + ".length")
    page.becomes(last_message + f".length > {n}")  # a stream
    expect(page.value("answering !== null && messages.length === 1 && messages[0].content === 'And?'"), "the oldest messages are still there")
    page.value("$('send').click()")  # "Stop" now
    page.becomes(last_message + ".endsWith('stopped') && answering === null")
    page.becomes("$('running').textContent === '0' && $('rows').textContent === 'No requests.'")
    # Why the requests of the button are refused stays to be read when the page has looked at the engine again.
    page.value("$('tokens').value = 0, $('burst').click()")
    page.becomes("document.body.innerText.includes('an answer of 0 tokens')")
    page.value("looked = last")
    page.becomes("last !== looked")
    expect(page.value("document.body.innerText.includes('an answer of 0 tokens')"), "nobody can read why requests are refused")
    page.value("$('tokens').value = 40, $('times').value = 1, $('burst').click()")
    page.becomes("$('refused').textContent === ''")
    # A stream that ends where the logits are not finite, as a server with damaged weights would send it.
    page.value("""{ const real = fetch, events = 'data: {"error": {"message": "the logits are not finite"}}\\n\\n';
        fetch = (path, options) => path.startsWith("/v1/") ? (fetch = real, Promise.resolve(new Response(events))) : real(path, options); }""")
    page.type_message("Hello")
    page.becomes(last_message + ".includes('not finite') && answering === null")
    # A page that is open for days sees millions of requests, and must not remember them.
    heap = lambda: (page.call("HeapProfiler.collectGarbage"), page.call("Runtime.getHeapUsage")["usedSize"])[1]
    before = heap()
    page.value("for (let i = 0; i < 400; ++i) "
               "drawPages({pages: Array.from({length: 1000}, (_, k) => [1e6 + 1000 * i + k, 0, 1]), page_size: 16})")
    kept = heap() - before
    expect(kept < 2e6, f"the page has kept {kept} bytes of 400,000 requests")
    page.value("last.tokens = 1e9")  # of a server that was stopped and started again
    page.becomes("last.tokens < 1e9")
    expect(page.value("history.every(speed => speed >= 0)"), "a negative speed")
    for key, sent in ("Aa~!", "Bearer Aa~!"), ("ключ", None):
        page.value(f"$('key').value = '{key}'")
        expect(page.value("new Headers(headers()).get('Authorization')") == sent, f"the key {key} is sent otherwise")
    page.value("$('key').value = ''")
    page.call("Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=1, mobile=False)
    expect(page.value("document.documentElement.scrollWidth <= innerWidth"), "a narrow window does not show all of the page's width")
    page.call("Emulation.clearDeviceMetricsOverride")


@contextlib.contextmanager
def folder_for_chromium():
    """Its other processes end a moment after the first one, and may write to the folder while it is removed."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        until = time.monotonic() + 10
        while os.path.exists(folder) and time.monotonic() < until:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--screenshot")
    options = parser.parse_args()
    program = os.environ.get("LLM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not (program and shutil.which(program)):
        print("check_page: skipped: there is no " + (program or "Chromium; LLM_CHROMIUM may name one"))
        sys.exit(77)
    with folder_for_chromium() as folder:
        page = Browser(program, options.url, folder)
        try:
            check(page)
            if options.screenshot:
                with open(options.screenshot, "wb") as file:
                    file.write(base64.b64decode(page.call("Page.captureScreenshot")["data"]))
        finally:
            page.process.terminate()
            page.process.wait()
    print("check_page: ok")


if __name__ == "__main__":
    main()
