"""Texts and tokens of a model, as the harness's own ``hf`` model has them."""

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix

from kvpolicy.errors import ModelError, TaskError


class TokenLM(TemplateLM):
    """What a model of the harness says of its tokens.

    Attributes:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take a Hugging Face tokenizer."""
        super().__init__()
        self.tokenizer = tokenizer

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that comes without a context.

        Raises:
            ModelError: The tokenizer has none.
        """
        found = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token: int | None = next((one for one in found if one is not None), None)
        if token is None:
            msg = (
                "this model's tokenizer has no token that begins or ends a text, so a text "
                "without a context cannot be scored or continued"
            )
            raise ModelError(msg)
        return token

    @property
    def tokenizer_name(self) -> str:
        """Which tokenizer wrote a chat."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text; one that begins with the first token is not given another."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.bos_token):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer(string, **options)["input_ids"]
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation the way the model was trained to be talked to.

        Raises:
            TaskError: The tokenizer has no chat template, or it refuses the conversation.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            msg = "this model's tokenizer has no chat template; leave --apply-chat-template out"
            raise TaskError(msg)
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )
        except Exception as error:  # of jinja, or whatever the template raises
            msg = f"this model's chat template refuses the conversation: {error}"
            raise TaskError(msg) from error

    def split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context, at least one, and of what continues it."""
        if context:
            given, scored = self._encode_pair(context, continuation)
            if given:
                return given, scored
            continuation = context + continuation  # nothing but spaces
        scored = self.tok_encode(continuation, add_special_tokens=False)
        if scored[:1] == [self.prefix_token_id]:
            return scored[:1], scored[1:]
        return [self.prefix_token_id], scored

    def special_token(self, text: str) -> int | None:
        """The special token that a text is, if it is one: decoded texts do not show it."""
        ids = self.tok_encode(text, add_special_tokens=False)
        hidden = len(ids) == 1 and not self.tokenizer.decode(ids, skip_special_tokens=True)
        return ids[0] if hidden else None
