"""What every test stands on: no network, no warnings of libraries we cannot mend, one thread."""

import os

# Before anything imports transformers or huggingface_hub: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import signal
import socket

import hypothesis
import pytest
import torch

_COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("dev", max_examples=15, **_COMMON)
hypothesis.settings.register_profile("few", max_examples=4, **_COMMON)
hypothesis.settings.register_profile("many", max_examples=40, print_blob=True, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

torch.set_num_threads(1)  # the tensors are tiny: a second thread costs more than it brings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As whoever starts us in the background of a script has it, and processes that tests start
    # and interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that opens a connection fails where it does so."""

    def refuse(_self: socket.socket, address: object) -> None:
        msg = f"a test tried to connect to {address!r}; tests run without a network"
        raise AssertionError(msg)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
