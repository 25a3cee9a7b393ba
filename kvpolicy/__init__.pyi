from kvpolicy.cache.rows import LayerRows as LayerRows
from kvpolicy.cache.rows import Tracks as Tracks
from kvpolicy.cache.softmax import observed_weights as observed_weights
from kvpolicy.engine.decide import Decision as Decision
from kvpolicy.engine.decide import GivenRows as GivenRows
from kvpolicy.engine.decide import decide as decide
from kvpolicy.engine.engine import Engine as Engine
from kvpolicy.engine.request import Request as Request
from kvpolicy.engine.request import Sampling as Sampling
from kvpolicy.engine.results import Result as Result
from kvpolicy.engine.results import RunReport as RunReport
from kvpolicy.errors import KVPolicyError as KVPolicyError
from kvpolicy.hf import PolicyCache as PolicyCache
from kvpolicy.hooks.defaults import top_rows as top_rows
from kvpolicy.hooks.discovery import installed_policies as installed_policies
from kvpolicy.hooks.discovery import load_policy as load_policy
from kvpolicy.hooks.discovery import register_file as register_file
from kvpolicy.markers import hookimpl as hookimpl
from kvpolicy.model.loading import load_model as load_model
from kvpolicy.model.packed import packed_model as packed_model
from kvpolicy.plan.plan import Plan as Plan
from kvpolicy.state import Memory as Memory
from kvpolicy.state import Parts as Parts
from kvpolicy.state import Registers as Registers
from kvpolicy.state import SequenceMemory as SequenceMemory
from kvpolicy.state import WaitingRequest as WaitingRequest

__version__: str
