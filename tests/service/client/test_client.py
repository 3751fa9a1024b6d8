"""The messages that the Python client sends, and the arguments that it refuses."""

from __future__ import annotations

import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from deltafront.service.client import DeltafrontClient, DeltafrontError, InvalidArgument
from deltafront.service.client.endpoint import wrong_endpoint

from ..inprocess import House
from ..pki import Authority
from ..test_requests import collect, expected, ids

USER = {"role": "user", "content": "a"}
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "given", [[65, np.int64(66), 67], list(np.array([65, 66, 67])), np.array([65, 66, 67], np.uint8)]
)
def test_token_ids_may_be_of_any_integer_type(client: DeltafrontClient, given: Any) -> None:
    text, *_ = collect(client.generate(given, max_tokens=4))
    assert text == expected(ids("ABC", bos=False), 4)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([65, "b", 67], r"prompt\.token_ids: 'str' object"),
        ([65, 66.0], r"prompt\.token_ids: 'float' object"),
        (["a", "b"], r"prompt\.token_ids: 'str' object"),
        ([USER, "b"], r"prompt\.messages: holds something else"),
        ([65, USER], r"prompt\.messages: holds something else"),
        ([65, -1], r"prompt\.token_ids: can't convert negative value"),
        ([65, 1 << 32], r"prompt\.token_ids: unsigned int is greater"),
        ([USER, {"role": "user"}], r"prompt\.messages\[1\]\.content: must be text"),
        ([{"content": "a"}], r"prompt\.messages\[0\]\.role: must be text"),
        ([USER, {**USER, "name": "b"}], r"prompt\.messages\[1\]\.name: must be left out"),
        (b"ABC", r"prompt: is bytes"),
        (bytearray(b"ABC"), r"prompt: is bytes"),
        ([{"role": "user", "content": "\udcff"}], r"prompt\.messages\[0\]\.content: .* surrogates"),
        ("\udcff", r"prompt\.text: .* surrogates"),
    ],
)
def test_error_names_the_field_of_an_invalid_prompt(client: DeltafrontClient, prompt: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        list(client.prefill(prompt))
    with pytest.raises(InvalidArgument, match=says.replace("prompt", "append", 1)):
        list(client.generate("a", append=prompt))


def test_stop_may_be_one_string_instead_of_a_list(client: DeltafrontClient) -> None:
    answer = expected(ids("ABC"), 12)
    never = answer[5] + answer[4]  # both letters are in the answer, but not this string
    assert never not in answer
    for stop, reason in ((never, "length"), (answer[4:6], "stop_string")):
        text, _, finish, _ = collect(client.generate("ABC", max_tokens=12, stop=stop))
        assert (text, finish.reason) == (answer.partition(stop)[0], reason)


@pytest.mark.parametrize(
    "address",
    ["localhost:nine", "[::1", "::1", "localhost", "localhost:9/", "http://localhost:9000", "a b:1"],
)
def test_error_names_a_malformed_address(address: str) -> None:
    with pytest.raises(InvalidArgument, match="address: ") as caught:
        DeltafrontClient(address)
    assert repr(address) in str(caught.value) and "host:port" in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:9", "10.0.0.1:9", "[::1]:9", "dns:///host", "unix:/tmp/x"])
def test_accepts_every_address_form_of_grpc(address: str) -> None:
    DeltafrontClient(address).close()


def test_asks_for_the_grpc_port_if_the_address_speaks_http() -> None:
    """Tries a server without gRPC, and one that answers gRPC calls with an HTTP status."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        with DeltafrontClient(address, retry_s=0) as client:
            for call in (client.info, lambda: list(client.prefill("a"))):
                with pytest.raises(InvalidArgument, match=f"address: {address} does not speak gRPC: .* 9000"):
                    call()
        server.shutdown()
    wrong = wrong_endpoint("x:1", "Received http2 header with status: 404")
    assert wrong is not None and "x:1 answers HTTP, but not gRPC" in wrong.message


def refused(address: str, tls: bool) -> str:
    with DeltafrontClient(address, tls=tls, retry_s=0) as client, pytest.raises(DeltafrontError) as caught:
        client.info()
    return str(caught.value)


def test_error_says_that_only_one_side_uses_tls(house: House, tmp_path: Path) -> None:
    assert refused(house.address, tls=True).startswith(f"tls: {house.address} does not speak TLS")
    certificate, key = Authority(tmp_path).sign("server")
    server = grpc.server(ThreadPoolExecutor(1))
    pair = [(key.read_bytes(), certificate.read_bytes())]
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', grpc.ssl_server_credentials(pair))}"
    server.start()
    assert f"{address} cannot be reached (does it speak TLS?)" in refused(address, tls=False)
    assert "DELTAFRONT_TLS_CA" in refused(address, tls=True)
    server.stop(None)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"seed": -1}, "sampling.seed: Value out of range: -1"),
        ({"top_k": 1 << 31}, "sampling.top_k: Value out of range"),
        ({"max_tokens": 1 << 31}, "sampling.max_tokens: Value out of range"),
        ({"temperature": 10**400}, "sampling.temperature: int too large"),
        ({"stop": ["a", "\udcff"]}, "sampling.stop: "),
        ({"options": {"tau": "high"}}, "attention.options: "),
        ({"recompute_blocks": 1 << 31}, "recompute_blocks: Value out of range"),
        ({"request_id": "\udcff"}, "request_id: "),
        *(({"session_ttl_s": seconds}, "session_ttl: must be finite") for seconds in (INF, NAN, 1e20)),
        *(({"timeout_s": seconds}, "deadline: must be finite") for seconds in (INF, NAN, 1e12)),
    ],
)
def test_error_names_the_argument_that_does_not_fit_protobuf(wish: dict[str, Any], says: str) -> None:
    """The client refuses before it connects: no server listens at the address."""
    with (
        DeltafrontClient("127.0.0.1:1", retry_s=0) as client,
        pytest.raises(InvalidArgument, match=f"^{re.escape(says)}"),
    ):
        list(client.generate("a", **wish))


def test_error_names_a_token_id_out_of_range() -> None:
    with DeltafrontClient("127.0.0.1:1", retry_s=0) as client:
        for call, field in ((client.release, "session_id"), (client.cancel, "request_id")):
            with pytest.raises(InvalidArgument, match=f"^{field}: "):
                call("\udcff")


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="address: is empty"):
        DeltafrontClient("")


@pytest.mark.parametrize("token", ["s\u00fc\u00df", "secret\n", "\udcff"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidArgument, match="token: must be printable ASCII") as caught:
        DeltafrontClient("127.0.0.1:1", token)
    assert token not in str(caught.value)
