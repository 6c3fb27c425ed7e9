// Connects the parts of the page.

import { models, Unreachable } from "./api.js";
import { Conversation } from "./chat.js";
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { byId, element } from "./dom.js";
import { drawn, example, QUESTION } from "./example.js";
import { wireViewer } from "./images.js";
import { askForKey, wireKey } from "./key.js";
import { watch } from "./live.js";
import { Panel } from "./panel.js";
import { canWatch, ScreenWatch } from "./screen.js";
import { Settings } from "./settings.js";

const settings = new Settings();
const composer = new Composer(ask);
const conversation = new Conversation(byId("talk"), settings, { change, edit, again });
const chats = new Chats({
  turns: () => conversation.turns,
  show,
  settle,
  tell: (about, words) => {
    composer.notices.clear(about);
    if (words) composer.notices.add(about, words);
  },
});
const screen = new ScreenWatch({
  turns: () => conversation.turns,
  busy: () => Boolean(conversation.running),
  body: () => settings.model,
  system: () => settings.system,
  failed: (error) => tell(`Screen sharing stopped: ${error.message}`),
});
const panels = [new Panel("chats", "chats-button"), new Panel("live", "figures")];

/** The turns are others now. */
function change(turns) {
  byId("hint").hidden = turns.length > 0;
  return chats.keep(turns);
}

/** Show a saved conversation. */
function show(turns) {
  try {
    conversation.show(turns);
  } catch {
    conversation.show([]); // another version of the page kept it, in a form that this one cannot show
  }
  byId("hint").hidden = conversation.turns.length > 0;
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
  composer.set(composer.question.value, composer.images);
  panels[0].uncover();
}

let asking = Promise.resolve(); // the last question, until it is answered or given back

/** Stop the answer in progress, and wait until its text so far is saved. */
function settle() {
  conversation.stop();
  return asking;
}

async function ask() {
  await composer.reading;
  if (!composer.confirmed()) return;
  const { editing } = composer;
  const text = composer.question.value.trim();
  const given = composer.images;
  if ((!text && !given.length) || conversation.running || !settings.check()) return;
  const images = [...screen.now().filter((each) => !given.includes(each)), ...given];
  composer.set("", []);
  const act = () => conversation.ask(text, images, editing ?? undefined);
  const giveBack = () =>
    composer.set(composer.question.value || text, [...images, ...composer.images], editing);
  await (asking = answered(act, giveBack, ask));
}

async function again(index) {
  if (conversation.running || !settings.check()) return;
  const answer = () => conversation.again(index);
  await (asking = answered(answer, () => {}, () => again(index)));
}

const LOST = "The server cannot be reached. Your text is still here: try again.";
const tell = (words, act) => composer.notices.add("failure", words, act);

/** Run a request. On failure, show a notice with a retry button and restore the question. */
async function answered(act, giveBack, retry) {
  composer.notices.clear("failure");
  composer.busy(true);
  composer.focus();
  try {
    await act();
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else if (error instanceof Unreachable) tell(LOST, ["Try again", retry]);
    else if (error.name !== "AbortError") tell(error.message);
    giveBack();
  } finally {
    composer.busy(false);
  }
}

function edit(index) {
  if (conversation.running) return;
  const { text, images } = conversation.turns[index];
  composer.notices.clear("failure");
  composer.set(text, [...images], index);
  composer.question.focus();
}

async function newChat() {
  if (conversation.running) await settle();
  chats.begin();
  composer.clear();
  composer.question.focus();
}

function escape(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open], :popover-open")) return;
  if (conversation.running) conversation.stop();
  else if (composer.editing !== null) composer.clear();
  else if (!byId("options").hidden) settings.open(false);
  else if (panels.some((panel) => panel.uncover())) return;
  else composer.notices.dismiss();
}

async function tryExample() {
  await composer.add([await example()]);
  composer.question.value = QUESTION;
  await ask();
}

byId("stop").addEventListener("click", () => conversation.stop());
byId("clear").addEventListener("click", newChat);
byId("try").append(
  drawn(),
  element("span", {}, element("b", {}, "Try an example"), element("br"), QUESTION),
);
byId("try").addEventListener("click", tryExample);
document.addEventListener("keydown", escape);
for (const panel of panels)
  panel.button.addEventListener("click", () => {
    for (const other of panels) if (other !== panel) other.uncover();
  });
wireViewer();
wireKey();

const kept = await chats.turns();
if (kept.length && !conversation.turns.length) show(kept);
chats.refresh();
document.body.dataset.ready = "";

const OFTEN = 10; // looks after which adapters may be others
let looks = 0;
watch(askForKey, async (state) => {
  settings.limit(state.context_length);
  composer.takes = state.takes;
  screen.context = state.context_length ?? 0;
  document.body.classList.toggle("can-watch", canWatch(state.takes));
  if (looks++ % OFTEN === 0) settings.offer(await models());
});
