// Puts the page together: what the user does, and whom that concerns.

import { storedKey, storeKey } from "./api.js";
import { Conversation } from "./chat.js";
import { byId, element } from "./dom.js";
import { imagesOf, picture, read } from "./images.js";
import { watch } from "./live.js";

const conversation = new Conversation(byId("talk"));
const hint = byId("hint");
let tray = []; // images that go with the next question
let reading = Promise.resolve();

// ---- images

/** One after the other: the order in which they were given is that in which they are sent. */
function add(files) {
  reading = reading.then(async () => {
    for (const file of files) {
      try {
        tray.push(await read(file));
      } catch (error) {
        complain(`${file.name}: ${error.message}`);
      }
      showTray();
    }
  });
}

function showTray() {
  byId("tray").replaceChildren(
    ...tray.map((image) => {
      const away = element("button", { type: "button", "aria-label": `Leave ${image.name} out` }, "×");
      away.addEventListener("click", () => {
        tray = tray.filter((each) => each !== image);
        showTray();
      });
      return element("span", { class: "waiting" }, picture(image), away);
    }),
  );
}

function complain(words) {
  byId("talk").append(element("p", { class: "error" }, words));
  byId("talk").lastChild.scrollIntoView({ block: "end" });
}

for (const name of ["dragenter", "dragover"])
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  add(imagesOf(event.dataTransfer));
});
document.addEventListener("paste", (event) => {
  const images = imagesOf(event.clipboardData);
  if (images.length) event.preventDefault();
  add(images);
});
byId("add").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", ({ target }) => {
  add([...target.files]);
  target.value = "";
});

// ---- questions

async function ask() {
  await reading;
  const question = byId("question");
  const [text, images] = [question.value.trim(), tray];
  if ((!text && !images.length) || conversation.running) return;
  tray = [];
  question.value = "";
  showTray();
  hint.remove();
  busy(true);
  try {
    await conversation.ask(text, images, Number(byId("max-tokens").value) || 512);
  } catch (error) {
    // Nothing was answered: the question goes back to where it was written.
    tray = [...images, ...tray];
    question.value ||= text;
    showTray();
    if (error.status === 401) await askForKey(error);
    else if (error.name !== "AbortError") complain(error.message);
  } finally {
    busy(false);
  }
}

function busy(yes) {
  byId("send").disabled = yes;
  byId("stop").hidden = !yes;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
byId("stop").addEventListener("click", () => conversation.stop());
byId("clear").addEventListener("click", () => {
  conversation.clear();
  byId("question").focus();
});

// ---- the key

let asking = null;

/** Resolves once the user has given a key, however many wait for it. */
function askForKey(error) {
  asking ??= new Promise((resolve) => {
    const [dialog, form, field] = [byId("key-dialog"), byId("key-form"), byId("key")];
    byId("key-reason").textContent = storedKey() && error ? error.message : "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.onsubmit = (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      storeKey(field.value.trim());
      field.value = "";
      dialog.close();
      byId("new-key").hidden = false;
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

byId("new-key").hidden = !storedKey();
byId("new-key").addEventListener("click", () => askForKey(null));

watch(askForKey);
