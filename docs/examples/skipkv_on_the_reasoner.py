"""SkipKV on the bundled reasoner: calibrate, run, compare. Takes two or three minutes.

Read it from top to bottom, or step through it: editors show the parts between ``# %%`` as cells.
For a model of your own, change MODEL and TASK, and use more problems.
"""

# %% Settings. The problems for calibration and those for reporting never overlap.
import subprocess
import sys
from statistics import fmean
from tempfile import TemporaryDirectory

from kvpolicy import Engine, Plan, load_model
from kvpolicy.lab.statistics import paired_proportions, wilson
from kvpolicy.lab.tasks.task import load_task

MODEL = TASK = "reasoner"
LAYER, BUDGET, BUFFER = 3, 127, 16
NUM_CALIBRATION, NUM_REPORTED = 100, 50

# %% Calibrate: the model solves training problems with the full cache. The vector is the difference
# of the hidden states before execution thoughts and before other thoughts.
folder = TemporaryDirectory()
vector = f"{folder.name}/vectors.safetensors"
command = f"steer calibrate --model {MODEL} --task {TASK} --layers {LAYER} --slots 50"
command += f" --n {NUM_CALIBRATION} --output {vector}"
subprocess.run([sys.executable, "-m", "kvpolicy", *command.split()], check=True)

# %% The plans to compare. All of them answer the same problems.
steered = {"vector": vector, "layer": LAYER}
plans = {
    "full cache": Plan.uniform("full"),
    "SEAL": Plan.uniform("full", "seal", knobs={"seal": steered}),
    "R-KV": Plan.uniform("rkv", budget=BUDGET, buffer=BUFFER),
    "SkipKV, no steering": Plan.uniform("skipkv", budget=BUDGET, buffer=BUFFER),
    "SkipKV": Plan.uniform("skipkv", budget=BUDGET, buffer=BUFFER, knobs={"skipkv": steered}),
}
model, tokenizer = load_model(MODEL)
task = load_task(TASK)
items = task.examples(NUM_REPORTED, seed=0)

# %% Run: accuracy with its 95 % interval, and its paired difference from the full cache.
print(f"{'':20}{'accuracy':>9}{'95 %':>10}{'against full':>21}{'tokens':>8}{'rows':>6}{'tok/s':>7}")
reference: list[bool] = []
for name, plan in plans.items():
    run = Engine(model, tokenizer, plan, slots=50).generate(
        [item.prompt for item in items], max_new_tokens=700
    )
    results = run.results()
    correct = [
        task.grade(result.text or "", item) for result, item in zip(results, items, strict=True)
    ]
    reference = reference or correct
    share = wilson(sum(correct), len(correct))
    pairs = list(zip(correct, reference, strict=True))
    outcomes = [(True, True), (True, False), (False, True), (False, False)]
    paired = paired_proportions(*map(pairs.count, outcomes))
    interval = f"{share.low:.0%}-{share.high:.0%}"
    against = f"{paired.value:+.0%} ({paired.low:+.0%} {paired.high:+.0%})"
    length = fmean(len(result.tokens) for result in results)
    rows = max(result.peak_rows for result in results)
    speed = run.report.throughput_tok_s
    print(
        f"{name:20}{share.value:9.0%}{interval:>10}{against:>21}{length:8.0f}{rows:6}{speed:7,.0f}"
    )

folder.cleanup()
