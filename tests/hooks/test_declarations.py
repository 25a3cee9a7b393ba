"""What a policy declares is checked when its stack is built, and the message says what to write."""

from typing import Any

import pytest

from kvpolicy import hookimpl
from kvpolicy.errors import PolicyLoadError
from kvpolicy.hooks.declarations import ARGUMENTS, HOOKS
from kvpolicy.hooks.stack import Stack

HEAD = """
import functools
from kvpolicy import hookimpl

class Mine:
"""
SCORE = "    @hookimpl\n    def score(self, keys): return None\n"


def stack_of(body: str, head: str = HEAD) -> Stack:
    found: dict[str, Any] = {}
    exec(head + body, found)
    return Stack([("mine", found["Mine"]())])


def problem_of(body: str, head: str = HEAD) -> str:
    """The message, one short line that names the policy."""
    with pytest.raises(PolicyLoadError) as error:
        stack_of(body, head)
    message = str(error.value)
    assert message.startswith("policy '")
    assert "'mine'" in message
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    return message


#: Attributes, and what the message says.
ATTRIBUTES = {
    "tracks = 'abc'": "declares tracks = 'abc'; give a tuple of distinct names",
    "tracks = (3,)": "declares tracks = (3,); give a tuple of distinct names",
    "tracks = ('',)": "declares tracks",
    "tracks = ('a', 'a')": "declares tracks",
    "tracks = {'a': 1}": "declares tracks",
    "tracks = None": "declares tracks = None",
    "tracks = ('attn_sums',)": "other than attn_sums",
    "tracks = (['a'],)": "declares tracks",
    "tracks = lambda self: ('a',)": "declares tracks",
    "tracks = (b'a',)": "declares tracks",
    "registers = 'abc'": "declares registers",
    "registers = (1, 2)": "declares registers",
    "registers = ('a', 'a')": "declares registers",
    "window_size = 0": "declares window_size = 0; give a number of queries from 1 to 65,536",
    "window_size = -3": "declares window_size = -3",
    "window_size = '8'": "declares window_size = '8'",
    "window_size = 2.5": "declares window_size",
    "window_size = True": "declares window_size",
    "window_size = None": "declares window_size",
    "window_size = 65537": "declares window_size = 65537; give a number of queries from 1",
    "window_size = 10 ** 100": "declares window_size",
    "protects = 4": "declares protects = 4; give two numbers of rows (first, newest)",
    "protects = (1, 2, 3)": "declares protects",
    "protects = (-1, 0)": "declares protects",
    "protects = ('a', 'b')": "declares protects",
    "protects = (0.5, 1)": "declares protects",
    "parts = 3": "declares parts",
    "parts = ['h2o']": "declares parts",
    "parts = [('h2o',)]": "declares parts",
    "parts = [(3, object())]": "declares parts",
    "parts = [('a', object())]": "policy 'a' in 'mine' implements no hook",
    "bounded = 'no'": "declares bounded = 'no'; give True or False",
    "bounded = 0": "declares bounded",
    "steers = 3": "declares steers = 3; give layers",
    "steers = (-1,)": "declares steers",
    "steers = ('0',)": "declares steers",
    "needs_shared_heads = 1": "declares needs_shared_heads = 1",
    "no_effect = True": "declares no_effect = True",
    "no_effect = ''": "declares no_effect",
    "inactive_hooks = ('due',)": 'write @hookimpl(when="NAME") at the hook',
    "inactive_hooks = property(lambda self: 1 / 0)": "declares inactive_hooks",
    "layers_alike = True": "declares layers_alike, which nothing reads; leave it out",
    "layers_alike = False": "name neither layer_idx nor bound",
    "tracks = property(lambda self: 1 / 0)": "attribute 'tracks' raises: ZeroDivisionError",
    "tracks = property(lambda self: self.nosuch)": "attribute 'tracks' raises: AttributeError",
    "bounded = property(lambda self: exit(3))": "attribute 'bounded' raises: SystemExit: 3",
    "window_size = property(lambda self: self.window_size)": "raises: RecursionError",
    "tracks = type('T', (tuple,), {'__iter__': lambda self: 1 / 0})('a')": "ZeroDivisionError",
    "tracks = (type('S', (str,), {'__eq__': lambda s, o: 1 / 0})('a'),)": "declares tracks",
    "tracks = type('O', (), {'__repr__': lambda self: 1 / 0})()": "tracks = an object of O",
    "tracks = type('O', (), {'__class__': property(lambda self: 1 / 0)})()": "ZeroDivisionError",
}


@pytest.mark.parametrize(("line", "expected"), ATTRIBUTES.items(), ids=list(ATTRIBUTES))
def test_attribute_of_another_kind_is_named(line: str, expected: str) -> None:
    assert expected in problem_of(f"    {line}\n{SCORE}")


#: Bodies of a class, and what the message says.
HOOK_BODIES = {
    "misspelt hook": (
        "    @hookimpl\n    def scoer(self, keys): pass\n",
        "there is no hook 'scoer'; did you mean score",
    ),
    "misspelt specname": (
        "    @hookimpl(specname='evicts')\n    def mine(self, keep): pass\n",
        "there is no hook 'evicts'; did you mean evict",
    ),
    "misspelt argument": (
        "    @hookimpl\n    def score(self, attn_weight): pass\n",
        "score() has no argument 'attn_weight'; did you mean attn_weights",
    ),
    "argument of another hook": (
        "    @hookimpl\n    def select(self, keys): pass\n",
        "select() has no argument 'keys'. Known are: layer_idx, scores, positions, prompt_len,",
    ),
    "an argument far from any": (
        "    @hookimpl\n    def score(self, xyzzy): pass\n",
        "Known are: layer_idx, keys, values",
    ),
    "no self": ("    @hookimpl\n    def score(keys): pass\n", "score() has no 'self'"),
    "no arguments": ("    @hookimpl\n    def score(): pass\n", "score() has no 'self'"),
    "*args": ("    @hookimpl\n    def score(self, *args): pass\n", "takes '*args'"),
    "**kwargs": ("    @hookimpl\n    def score(self, keys, **kw): pass\n", "takes '**kw'"),
    "by keyword only": ("    @hookimpl\n    def score(self, *, keys): pass\n", "by keyword only"),
    "a default": (
        "    @hookimpl\n    def score(self, keys=None): pass\n",
        "score() gives 'keys' a default, and would always get that",
    ),
    "async": ("    @hookimpl\n    async def score(self, keys): pass\n", "score() is async"),
    "an async generator": (
        "    @hookimpl(wrapper=True)\n    async def score(self, keys): yield\n",
        "score() is async",
    ),
    "a generator": (
        "    @hookimpl\n    def score(self, keys): yield keys\n",
        "write @hookimpl(wrapper=True)",
    ),
    "a wrapper without yield": (
        "    @hookimpl(wrapper=True)\n    def score(self, keys): return keys\n",
        "score() is declared as a wrapper and has no yield",
    ),
    "an old-style wrapper": (
        "    import pluggy\n\n"
        "    @pluggy.HookimplMarker('kvpolicy')(hookwrapper=True)\n    def score(self): yield\n",
        "score() is a hookwrapper; write @hookimpl(wrapper=True)",
    ),
    "when an attribute that is not there": (
        "    every = None\n    @hookimpl(when='evry')\n    def score(self): pass\n",
        "the attribute 'evry' is true, and there is none; did you mean every?",
    ),
    "when a number": (
        "    @hookimpl(when=3)\n    def score(self): pass\n",
        "score() is there when 3; give the name of an attribute, or a function",
    ),
    "when a function that fails": (
        "    @hookimpl(when=lambda self: self.every)\n    def score(self): pass\n",
        "does not fit the hook specs: AttributeError",
    ),
    "when something without a truth value": (
        "    no = type('O', (), {'__bool__': lambda self: 1 / 0})()\n\n"
        "    @hookimpl(when='no')\n    def score(self): pass\n",
        "does not fit the hook specs: ZeroDivisionError",
    ),
    "a callable object": (
        "    class Call:\n        def __call__(self, keys): pass\n    score = hookimpl(Call())\n",
        "a hook is a method written with def",
    ),
    "a partial": (
        "    score = hookimpl(functools.partial(lambda self, keys: 3))\n",
        "a hook is a method written with def",
    ),
    "a class": (
        "    @hookimpl\n    class score:\n        def __init__(self, keys): pass\n",
        "a hook is a method written with def",
    ),
    "a cached function": (
        "    @hookimpl\n    @functools.cache\n    def score(self, key): pass\n",
        "has no argument 'key'",
    ),
    "nothing decorated": ("    def score(self, keys): pass\n", "implements no hook"),
    "a static method with a wrong name": (
        "    @hookimpl\n    @staticmethod\n    def score(key): pass\n",
        "has no argument 'key'; did you mean keys",
    ),
    "equality": (
        "    def __eq__(self, other): raise SystemExit\n" + SCORE,
        "is compared by value",
    ),
    "a dir that raises": ("    def __dir__(self): 1 / 0\n" + SCORE, "cannot be used: ZeroDivision"),
    "attributes that raise": (
        "    def __getattribute__(self, name): raise SystemExit(name)\n    tracks = ()\n" + SCORE,
        "SystemExit",
    ),
}


@pytest.mark.parametrize(("body", "expected"), HOOK_BODIES.values(), ids=HOOK_BODIES)
def test_hook_that_cannot_be_called_is_named(body: str, expected: str) -> None:
    assert expected in problem_of(body)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_argument_is_found_again_when_misspelt(hook: str) -> None:
    for argument in ARGUMENTS[hook]:
        message = problem_of(f"    @hookimpl\n    def {hook}(self, {argument}s_): pass\n")
        assert f"{hook}() has no argument '{argument}s_'" in message
        assert argument in message.partition("did you mean ")[2].partition("?")[0]


#: Unusual bodies that are no mistakes.
ODD = {
    "a static method": "    @staticmethod\n    @hookimpl\n    def score(keys): return None\n",
    "a static method, decorated outside": (
        "    @hookimpl\n    @staticmethod\n    def score(keys): return None\n"
    ),
    "a class method": "    @classmethod\n    @hookimpl\n    def score(cls, keys): return None\n",
    "a default of its own": ("    @hookimpl\n    def score(self, keys, scale=2.0): return None\n"),
    "a property that raises and is nobody's business": (
        "    other = property(lambda self: exit(3))\n" + SCORE
    ),
    "an attribute for everything": (
        "    def __getattr__(self, name): raise SystemExit(name)\n" + SCORE
    ),
    "no hash, no truth, no length": (
        "    __hash__ = None\n    def __bool__(self): 1 / 0\n    def __len__(self): 1 / 0\n" + SCORE
    ),
    "no text": "    def __repr__(self): 1 / 0\n    __str__ = __repr__\n" + SCORE,
    "lists": "    tracks = ['a']\n    protects = [1, 2]\n    steers = [0]\n" + SCORE,
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_odd_policy_that_keeps_the_contract_works(body: str) -> None:
    stack = stack_of(body)
    assert stack.implements("score")
    assert stack.bounded


def test_metaclass_that_lies_is_named() -> None:
    head = HEAD.replace(
        "class Mine:",
        "class Meta(type):\n"
        "    def __getattribute__(cls, name): raise SystemExit(name)\n\n"
        "class Mine(metaclass=Meta):",
    )
    assert "SystemExit" in problem_of(SCORE, head)


def test_an_object_of_a_builtin_kind_implements_no_hook() -> None:
    for policy in (None, 3, "h2o", object(), [], hookimpl):
        with pytest.raises(PolicyLoadError, match="'mine'"):
            Stack([("mine", policy)])
