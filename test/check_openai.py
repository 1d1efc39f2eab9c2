#!/usr/bin/env python3
"""Does the openai package find in generate --serve what it expects, and does the server bear its clients?

    python3 check_openai.py URL [--streams 200]         URL: http://127.0.0.1:8000, of a server with --max-waiting 300

What a client can ask for, each kind of error, and then many at once: every stream must bring the text that its request brings
alone, while other clients are killed in the middle of theirs, send half of a request, or what is none.

Exit status: 0 all is well; 1 not; 77 (skipped) the package openai is missing.
"""

import argparse
import asyncio
import json
import math
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

try:
    import openai
except ImportError as error:
    print(f"check_openai: skipped: {error}")
    sys.exit(77)

KEY = "none"
HELLO = [{"role": "user", "content": "Hello"}]


def fail(message):
    print(f"check_openai: FAILED: {message}")
    sys.exit(1)


def expect(condition, message):
    if not condition:
        fail(message)


def refused(status, words, call):
    try:
        call()
    except openai.APIStatusError as error:
        expect(error.status_code == status, f"status {error.status_code} instead of {status}: {error}")
        expect(words in str(error), f"'{words}' is not in: {error}")
        return error
    fail(f"was not refused with {status} ({words})")


def check_answers(client, model):
    ask = dict(model=model, prompt="Line 12", max_tokens=24, seed=3, extra_body={"ignore_eos": True})
    whole = client.completions.create(**ask)
    text = whole.choices[0].text
    expect(whole.usage.completion_tokens == 24 and whole.usage.total_tokens == 24 + whole.usage.prompt_tokens, f"usage {whole.usage}")
    expect(whole.choices[0].finish_reason == "length", f"finish_reason {whole.choices[0].finish_reason}")
    pieces, usage = "", None
    for event in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        pieces += event.choices[0].text if event.choices else ""
        usage = event.usage or usage
    expect(pieces == text and usage == whole.usage, "a stream has another text or another usage")

    three = client.completions.create(**ask, n=3)
    expect([c.index for c in three.choices] == [0, 1, 2] and three.choices[0].text == text, "n = 3")
    expect(len({c.text for c in three.choices}) == 3, "three answers are not three")
    stop = client.completions.create(**ask, stop=[text[8:11]])
    expect(stop.choices[0].text == text[:text.index(text[8:11])] and stop.choices[0].finish_reason == "stop", "stop")

    logprobs = client.completions.create(**ask, logprobs=5).choices[0].logprobs
    expect(len(logprobs.tokens) == 24 == len(logprobs.token_logprobs) == len(logprobs.text_offset), "logprobs")
    expect(all(5 <= len(top) <= 6 and sum(map(math.exp, top.values())) < 1.001 for top in logprobs.top_logprobs), "top_logprobs")

    talk = dict(model=model, messages=HELLO, max_completion_tokens=16, seed=1, extra_body={"ignore_eos": True})
    answer = client.chat.completions.create(**talk, logprobs=True, top_logprobs=4).choices[0]
    expect(answer.message.role == "assistant" and len(answer.logprobs.content) == 16, "a conversation")
    said = b"".join(bytes(token.bytes) for token in answer.logprobs.content).decode(errors="replace")
    expect(said == answer.message.content, "the bytes of the tokens are not the answer")
    expect(all(len(token.top_logprobs) == 4 for token in answer.logprobs.content), "top_logprobs of a conversation")
    pieces = "".join(e.choices[0].delta.content or "" for e in client.chat.completions.create(**talk, stream=True))
    expect(pieces == answer.message.content, "a conversation as a stream has another text")
    expect([m.id for m in client.models.list()] == [model] and client.models.retrieve(model).id == model, "models")


def check_errors(client, model):
    complete = lambda **fields: (lambda: client.completions.create(**{"model": model, "prompt": "a", **fields}))
    error = refused(404, "no model", complete(model="gpt-9"))
    expect(error.code == "model_not_found" and error.param == "model", f"code {error.code}, param {error.param}")
    expect(refused(400, "expected a number", complete(temperature="hot")).param == "temperature", "param")
    expect(refused(400, "tokens", complete(prompt="a" * 100000)).code == "context_length_exceeded", "code of a long prompt")
    refused(400, "top_p", complete(top_p=2))
    refused(400, "prompt", complete(prompt={"a": 1}))
    refused(413, "larger than", complete(prompt="a" * 10_000_000))
    refused(400, "messages", lambda: client.chat.completions.create(model=model, messages=[]))
    refused(400, "response_format", lambda: client.chat.completions.create(model=model, messages=HELLO, response_format={"type": "json_object"}))


def raw(url, data, wait=5.0):
    """The status that the bytes `data` are answered with."""
    host, port = re.match(r"http://([^:/]+):(\d+)", url).groups()
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        connection.sendall(data)
        answer = connection.recv(65536)
    return int(answer.split()[1]) if answer else 0


def check_bytes(url):
    post = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
    for data, status in ((b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400), (b"GET /v1/models HTTP/1.1\r\n\r\n", 200),
                         (post + b"Content-Length: 5\r\n\r\n{nope", 400), (post + b"Content-Length: 2\r\n\r\n\xff\xfe", 400),
                         (post + b"\r\n", 411), (b"DELETE /v1/models HTTP/1.1\r\n\r\n", 405), (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404)):
        got = raw(url, data)
        expect(got == status, f"{data!r} is answered with {got} instead of {status}")


def number(url, name):
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    return float(re.search(rf"^{re.escape(name)} (.*)$", text, re.M).group(1))


def request_number(i, model):
    """Requests that differ in all that may be mixed up."""
    rng = random.Random(i)
    prompt = ("The first words are everybody's. " if i % 3 == 0 else "") + f"Request {i}: " + "".join(rng.choices("abcdefgh ", k=rng.randint(1, 90)))
    return dict(model=model, prompt=prompt, max_tokens=rng.randint(8, 48), seed=i, temperature=rng.choice([0, 0.7, 1.3]),
                extra_body={"ignore_eos": True, "top_k": rng.choice([0, 5, 40])})


async def streamed(client, request, started):
    text = ""
    stream = await client.completions.create(**request, stream=True)
    started.append(1)
    async for event in stream:
        text += event.choices[0].text
    return text


async def check_many(url, model, n):
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, timeout=300, max_retries=0)
    alone = []
    for i in range(n):
        alone.append((await client.completions.create(**request_number(i, model))).choices[0].text)
    before = number(url, 'llm_requests_total{outcome="cancelled"}')
    # Clients that are killed, and some that never finish what they send.
    forever = [sys.executable, __file__, url, "--forever", model]
    victims = [subprocess.Popen(forever, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    host, port = re.match(r"http://([^:/]+):(\d+)", url).groups()
    slow = [socket.create_connection((host, int(port))) for _ in range(20)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
    for victim in victims:  # each has its first piece
        expect(victim.stdout.readline() == "begun\n", "a client that is to be killed has no answer")
    started = []
    streams = [asyncio.create_task(streamed(client, request_number(i, model), started)) for i in range(n)]
    rng = random.Random(1)
    for victim in victims:
        await asyncio.sleep(rng.random() * 0.2)
        victim.send_signal(signal.SIGKILL)
    texts = await asyncio.gather(*streams)
    for i, (text, wanted) in enumerate(zip(texts, alone)):
        expect(text == wanted, f"request {i} got {text!r}, alone {wanted!r}")
    for connection in slow:
        connection.close()
    for victim in victims:
        victim.wait()
    until = time.monotonic() + 20
    while number(url, "llm_running") + number(url, "llm_waiting") > 0 and time.monotonic() < until:
        time.sleep(0.05)
    expect(number(url, "llm_pages_used") == 0, "pages are lost")
    expect(number(url, 'llm_requests_total{outcome="cancelled"}') == before + len(victims), "a killed client was not noticed")
    await client.close()


def stream_forever(url, model):
    client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
    for i, _ in enumerate(client.completions.create(model=model, prompt="on and on", max_tokens=3900, stream=True, extra_body={"ignore_eos": True})):
        if i == 0:
            print("begun", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--forever", metavar="MODEL", help="a client that is to be killed")
    options = parser.parse_args()
    if options.forever:
        return stream_forever(options.url, options.forever)
    client = openai.OpenAI(base_url=options.url + "/v1", api_key=KEY, max_retries=0)
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        fail(f"no server answers at {options.url}: start ./generate --serve")
    check_answers(client, model)
    check_errors(client, model)
    check_bytes(options.url)
    started = time.monotonic()
    asyncio.run(check_many(options.url, model, options.streams))
    expect(json.load(urllib.request.urlopen(options.url + "/health"))["status"] == "ok", "health")
    print(f"check_openai: ok, {options.streams} streams at once, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
