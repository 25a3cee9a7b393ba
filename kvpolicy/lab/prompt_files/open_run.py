"""A run whose requests come one by one while others are served."""

from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.request import Request


class OpenRun(Run):
    """A `Run` that begins without requests; `submit` adds them between two steps.

    It holds nothing of a request that has ended.
    """

    def __init__(self, engine: Engine, *, max_len: int, max_prompt_len: int) -> None:
        """Allocate the slots of the engine.

        Args:
            engine: Serves the requests.
            max_len: The most tokens of a prompt and its answer.
            max_prompt_len: The most tokens of a prompt.
        """
        super().__init__(engine, [])
        self.batch = engine.new_batch(
            engine.num_slots,
            max_len,
            max_prompt_len,
            max_steps=0 if engine.eager_reason else engine.steps_per_read,
        )
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """Add a request.

        Returns:
            Its number, which its result has as ``id``.

        Raises:
            RequestError: It cannot be served.
        """
        number = self._num_submitted
        self._waiting[number] = self._sequence_of(number, request)
        self._num_submitted += 1
        return number
