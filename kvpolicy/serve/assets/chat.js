// The page: a conversation on the left, and beside it which tokens are held now.
//
// A second model may be asked the same: two plans of one model, side by side.

import { button, byId, fill, h, select } from "./dom.js";
import { ask } from "./events.js";
import { legend } from "./held.js";
import { lane } from "./lane.js";
import { themeButton } from "./theme.js";

const NOBODY = "";

const key = h("input", { type: "password", autocomplete: "off" });
const maxTokens = h("input", { type: "number", min: 1, step: 1, placeholder: "no limit" });
const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, placeholder: "model's" });
const choices = h("div", { class: "tools" });
let lanes = [];
let running = null;
let isAtEnd = true; // of the messages, or following it
let scrolledTo = 0;

const field = (label, input) => h("label", { class: "field" }, h("span", {}, label), input);
// A form of its own: browsers want one around a password.
const keyField = h("form", { hidden: true }, field("Key", key));
const number = (input) => (input.value === "" ? null : Number(input.value));

fill(byId("tools"), choices, field("Most tokens", maxTokens), field("Temperature", temperature), keyField, themeButton());
fill(byId("legend"), legend());

function tell(problem) {
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem;
}

/** Ask which models there are; a server with keys is asked again when a key is typed. */
async function begin() {
  let found;
  try {
    found = await ask("/v1/models", key.value);
  } catch (error) {
    if (error.status === 401) keyField.hidden = false;
    tell(error.message);
    return;
  }
  tell("");
  // The names alone are other names of the first plan.
  const own = found.data.filter((one) => one.parent !== null);
  const plans = (own.length ? own : found.data.slice(0, 1)).map((one) => one.id);
  const options = plans.map((id) => [id, id]);
  const first = select("Model", options, plans[0], choose, { id: "model" });
  const second = select("Beside it", [[NOBODY, "none"], ...options], plans[1] ?? NOBODY, choose, { id: "beside" });
  fill(choices, first, second);
  choose();
}

function choose() {
  const ids = [byId("model").value, byId("beside").value].filter((id) => id !== NOBODY);
  lanes = ids.map((id) => lane(id));
  fill(byId("panels"), lanes.map((one) => one.panel.element));
  fill(byId("turns"), h("p", { class: "hint" }, "Nothing has been said yet."));
}

async function send(event) {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || running !== null || !lanes.length) return;
  running = new AbortController();
  setRunning(true);
  tell("");
  const turns = byId("turns");
  turns.querySelector(".hint")?.remove();
  const boxes = lanes.map(() => h("div", { class: "turn" }));
  turns.append(h("div", { class: "turn user" }, h("h2", {}, "you"), h("p", { class: "said" }, question)), h("div", { class: "answers" }, boxes));
  const options = { key: key.value, signal: running.signal, maxTokens: number(maxTokens), temperature: number(temperature) };
  isAtEnd = true;
  scrollOn();
  const follow = setInterval(scrollOn, 200);
  const ends = await Promise.allSettled(lanes.map((one, i) => one.answer(question, boxes[i], options)));
  clearInterval(follow);
  scrollOn();
  const failed = ends.find((end) => end.status === "rejected");
  if (failed) tell(failed.reason.message);
  else if (!running.signal.aborted) byId("question").value = "";
  running = null;
  setRunning(false);
}

/** Show the newest words, unless somebody has scrolled back to read others. */
function scrollOn() {
  if (isAtEnd) byId("turns").scrollTop = byId("turns").scrollHeight;
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  byId("clear").disabled = isRunning;
  for (const one of choices.querySelectorAll("select")) one.disabled = isRunning;
}

byId("turns").addEventListener("scroll", ({ target }) => {
  // Text that has come since is no scrolling back.
  if (target.scrollTop < scrolledTo) isAtEnd = false;
  if (target.scrollTop + target.clientHeight > target.scrollHeight - 40) isAtEnd = true;
  scrolledTo = target.scrollTop;
});
key.addEventListener("change", begin);
keyField.addEventListener("submit", (event) => event.preventDefault());
byId("ask").addEventListener("submit", send);
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", choose);

const { question } = await ask("/assets/example.json");
await begin();
if (question) {
  byId("question").value = question.trim();
  byId("clear").after(button("Example", () => (byId("question").value = question.trim()), { id: "example" }));
} else {
  tell("This model has no chat template, so it cannot be talked to here; see /v1/completions.");
  byId("send").disabled = true;
}
document.documentElement.dataset.ready = "";
