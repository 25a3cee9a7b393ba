"""The other engines that can be measured: the one list of them."""

from typing import Final

from kvpolicy.lab.bench.contenders.rivals.llama_cpp import LLAMA_CPP
from kvpolicy.lab.bench.contenders.rivals.openvino import OPENVINO
from kvpolicy.lab.bench.contenders.rivals.vllm import VLLM

#: By name.
KNOWN: Final = {one.name: one for one in (VLLM, OPENVINO, LLAMA_CPP)}
