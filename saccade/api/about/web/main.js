// Puts the page together: what the user does, and whom that concerns.

import { models, Unreachable } from "./api.js";
import { Conversation } from "./chat.js";
import { Composer } from "./composer.js";
import { byId, element } from "./dom.js";
import { drawn, example, QUESTION } from "./example.js";
import { wireViewer } from "./images.js";
import { askForKey, wireKey } from "./key.js";
import { openPanel, panelCovers, watch, wirePanel } from "./live.js";
import { Settings } from "./settings.js";
import { load, save } from "./store.js";

const settings = new Settings();
const composer = new Composer(ask);
const conversation = new Conversation(byId("talk"), settings, { change, edit, again });

/** The turns are others now. */
function change(turns) {
  byId("hint").hidden = turns.length > 0;
  return save(turns);
}

async function ask() {
  await composer.reading;
  if (!composer.confirmed()) return;
  const { images, editing } = composer;
  const text = composer.question.value.trim();
  if ((!text && !images.length) || conversation.running || !settings.check()) return;
  composer.set("", []);
  const given = () => conversation.ask(text, images, editing ?? undefined);
  const giveBack = () =>
    composer.set(composer.question.value || text, [...images, ...composer.images], editing);
  if (!(await answered(given, giveBack, ask))) giveBack();
}

async function again(index) {
  if (conversation.running || !settings.check()) return;
  await answered(() => conversation.again(index), () => {}, () => again(index));
}

const LOST = "The server cannot be reached. Nothing is lost: try again.";
const tell = (words, act) => composer.notices.add("failure", words, act);

/** Do what asks; a failure is said, with a way to try again. */
async function answered(act, giveBack, retry) {
  composer.notices.clear("failure");
  composer.busy(true);
  composer.focus();
  try {
    await act();
    return true;
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else if (error instanceof Unreachable) tell(LOST, ["Try again", retry]);
    else if (error.name !== "AbortError") tell(error.message);
    return false;
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

function newChat() {
  conversation.clear();
  composer.clear();
  composer.question.focus();
}

function escape(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (conversation.running) conversation.stop();
  else if (composer.editing !== null) composer.clear();
  else if (!byId("options").hidden) settings.open(false);
  else if (panelCovers()) openPanel(false);
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
wireViewer();
wireKey();
wirePanel();

const kept = await load();
if (kept.length && !conversation.turns.length) {
  try {
    conversation.show(kept);
    byId("hint").hidden = true;
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
  } catch {
    conversation.clear(); // another version of the page kept it, in a form that this one cannot show
  }
}
document.body.dataset.ready = "";

watch(askForKey, async (state, first) => {
  settings.limit(state.context_length);
  composer.takes = state.takes;
  if (first) settings.offer(await models());
});
