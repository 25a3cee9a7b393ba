"""Plans that are refused, for the tests of plans and for the catalogue of messages."""

from typing import Any

#: By kind of mistake: a plan, and what the message of each problem names, in order.
MALFORMED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"bugdet": 3, "stack": ["full"]}, ("'bugdet'",)),
    "two unknown keys": ({"a": 3, "b": 4, "stack": ["full"]}, ("key 'a'", "key 'b'")),
    "name": ({"name": "x", "stack": ["full"]}, ("'name'",)),
    "sampling": (
        {"sampling": {"temperature": 1}, "stack": ["full"]},
        ("'sampling'",),
    ),
    "steering": (
        {"steering": {"vector": "x"}, "stack": ["full"]},
        ("'steering'",),
    ),
    "both sections": (
        {"steering": {}, "sampling": {}, "stack": ["full"]},
        ("'sampling'", "'steering'"),
    ),
    "budget of the wrong type": (
        {"budget": [3], "stack": ["h2o"]},
        ("budget: [3]",),
    ),
    "budget is text": ({"budget": "64", "stack": ["h2o"]}, ("budget: '64'",)),
    "budget is a fraction": ({"budget": 0.5, "stack": ["h2o"]}, ("budget: 0.5",)),
    "budget is true": ({"budget": True, "stack": ["h2o"]}, ("budget: True",)),
    "knob of the wrong type": (
        {"budget": 64, "stack": [{"policy": "rkv", "window_size": "8"}]},
        ("'window_size'",),
    ),
    "buffer of the wrong type": (
        {"budget": 9, "buffer": "x", "stack": ["h2o"]},
        ("buffer: 'x'",),
    ),
    "length of the wrong type": (
        {"budget": "9%", "length": 1.5, "stack": ["h2o"]},
        ("length: 1.5",),
    ),
    "no length": ({"budget": "9%", "stack": ["h2o"]}, ("length",)),
    "a share of nothing": (
        {"budget": "0%", "length": 9, "stack": ["h2o"]},
        ('"0%"',),
    ),
    "budget 0": (
        {"budget": 0, "stack": ["h2o"]},
        ("budget: 0",),
    ),
    "budget and buffer 0": (
        {"budget": 0, "buffer": 0, "stack": ["h2o"]},
        ("budget: 0", "buffer: 0"),
    ),
    "more than can be counted": (
        {"budget": 2**40, "stack": ["h2o"]},
        ("budget: 1099511627776",),
    ),
    "no budget": ({"stack": ["h2o"]}, ("layer 0 (h2o)",)),
    "budget below what is protected": (
        {"budget": 4, "stack": ["rkv"]},
        ("(rkv) protect 8",),
    ),
    "no policy": ({"budget": 4}, ("'all'",)),
    "stack of the wrong type": ({"budget": 9, "stack": "h2o"}, ("stack: 'h2o'",)),
    "policy of the wrong type": (
        {"budget": 9, "stack": ["h2o", 3, {"knob": 1}]},
        ("stack[1]: 3", "stack[2]: {'knob': 1}"),
    ),
    "unknown policies": (
        {"budget": 9, "stack": ["hh2o", "protct"]},
        ("'hh2o'", "'protct'"),
    ),
    "unknown policy for schedule": (
        {"stack": ["full"], "schedule": ["skipkv_batchs"]},
        ("'skipkv_batchs'",),
    ),
    "unknown knob": (
        {"budget": 9, "stack": [{"policy": "rkv", "mix_lamda": 1}]},
        ("'mix_lamda'",),
    ),
    "refused knobs of two policies": (
        {
            "budget": 9,
            "stack": [{"policy": "rkv", "mix_lambda": 2}, {"policy": "protect", "n_sink": -1}],
        },
        (
            "'mix_lambda'",
            "'n_sink'",
        ),
    ),
    "padding": (
        {"stack": ["full"], "padding": "left"},
        ("padding: 'left'",),
    ),
    "layers of the wrong type": (
        {"stack": ["full"], "layers": 3},
        ("layers: 3",),
    ),
    "group of the wrong type": (
        {"stack": ["full"], "layers": [3]},
        ("layers[0]: 3",),
    ),
    "unknown keys in groups": (
        {"stack": ["full"], "layers": [{"where": "0:2", "stak": 1}, {"where": "2:", "buget": 2}]},
        ("layers[0]: unknown key 'stak'", "layers[1]: unknown key 'buget'"),
    ),
    "where of the wrong type": (
        {"stack": ["full"], "layers": [{"where": 3}]},
        ("layers[0].where: 3",),
    ),
    "where is empty": (
        {"stack": ["full"], "layers": [{"where": []}]},
        ("layers[0].where: []",),
    ),
    "where of no slice": (
        {"stack": ["full"], "layers": [{"where": "first"}]},
        ("layers[0].where: 'first'",),
    ),
    "a step of 0": (
        {"stack": ["full"], "layers": [{"where": "::0"}]},
        ("layers[0].where: '::0'",),
    ),
    "layer beyond the model": (
        {"stack": ["full"], "layers": [{"where": [0, 9]}]},
        ("layer 9",),
    ),
    "an empty slice": (
        {"stack": ["full"], "layers": [{"where": "7:"}]},
        ("4 layers",),
    ),
    "overlaps and gaps": (
        {"stack": ["full"], "layers": [{"where": [0, 1, 0]}, {"where": [1]}]},
        (
            "layer 0 twice",
            "layer 1 twice",
            "layers 2 to 3",
        ),
    ),
    "two groups with two mistakes each": (
        {
            "layers": [
                {"where": "0:2", "stack": ["h2o"], "budget": 0, "buffer": 0},
                {"where": "2:", "stack": ["rkv"], "budget": 3, "buffer": -1},
            ]
        },
        (
            "layers[0].budget: 0",
            "layers[0].buffer: 0",
            "layers[1].buffer: -1",
        ),
    ),
    "extends of the wrong type": ({"extends": 3}, ("extends is 3",)),
    "extends nothing": ({"extends": "none.toml"}, ("none.toml",)),
    "a key of the wrong type": ({3: 4}, ("key 3",)),
}
