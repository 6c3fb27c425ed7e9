// "Share my screen": frames are appended to a video that is sent as a question's `video` part. Each
// new pair of frames is sent to the server at once, so that no answer waits for them.

import { chat, Refused } from "./api.js";
import { byId, element, milliseconds } from "./dom.js";
import { messagesOf } from "./messages.js";
import { momentsOf } from "./trace.js";

const QUALITY = 0.8; // of JPEG
const MAX_FRAMES = 64; // that are kept; then the oldest pair goes
const PIXELS_A_TOKEN = 1024; // of a pair, in most families
const SHARE = 0.6; // of the model's context

/** Whether the browser and the server support screen sharing. */
export const canWatch = (takes) =>
  window.isSecureContext &&
  Boolean(navigator.mediaDevices?.getDisplayMedia) &&
  takes.includes("frames");

export class ScreenWatch {
  /** on: {turns(), busy(), body(), system(), failed(error)}: of the conversation its turns, whether
   * it is being answered, and what goes beside its messages; what the user is to hear of. */
  constructor(on) {
    this.on = on;
    this.context = 0; // tokens
    this.stream = null;
    this.video = null; // {name, frames, seconds, pixels}: what goes with a question
    byId("watch").addEventListener("click", () => this.start());
    byId("unwatch").addEventListener("click", () => this.stop());
  }

  /** Ask the user for a screen, and capture it until sharing stops. */
  async start() {
    byId("watch").disabled = true; // the browser asks once
    try {
      this.stream = await navigator.mediaDevices.getDisplayMedia({ video: true, audio: false });
      this.screen = element("video");
      this.screen.muted = true;
      this.screen.srcObject = this.stream;
      await this.screen.play();
    } catch (error) {
      byId("watch").disabled = false;
      this.stop();
      if (error.name !== "NotAllowedError") this.on.failed(error);
      return;
    }
    byId("watch").disabled = false;
    for (const track of this.stream.getTracks()) track.addEventListener("ended", () => this.stop());
    const [seconds, pixels] = ["pace", "detail"].map((id) => Number(byId(id).value));
    this.video = { name: "screen", frames: [], seconds, pixels };
    const room = 2 * Math.floor((SHARE * this.context * PIXELS_A_TOKEN) / pixels);
    this.most = Math.max(4, Math.min(MAX_FRAMES, room));
    this.canvas = this.#canvas(pixels);
    this.single = null; // a frame that waits for the other of its pair
    this.sending = false;
    byId("screen-words").textContent = "Sharing your screen";
    this.#offer();
    this.#look();
    this.#look(); // a pair, so that a question can be asked at once
    this.clock = setInterval(() => this.#look(), 1000 * seconds);
  }

  stop() {
    clearInterval(this.clock);
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.stream = null;
    this.video = null;
    this.#offer();
  }

  /** What goes with a question that is asked now: [the video], as it is now; [] if nothing is
   * watched, or if it is in the conversation already, where it has grown. */
  now() {
    if (!this.video) return [];
    this.#grow();
    if (this.single) this.#grow();
    return this.on.turns().some(({ images }) => images.includes(this.video)) ? [] : [this.video];
  }

  #offer() {
    byId("watching").hidden = !this.stream;
    byId("watch").hidden = Boolean(this.stream);
    byId("screen-now").removeAttribute("src");
  }

  /** All frames have one size, also where a window that is watched has another later. */
  #canvas(pixels) {
    const { videoWidth: width, videoHeight: height } = this.screen;
    const scale = Math.min(1, Math.sqrt(pixels / (width * height)));
    const even = (length) => Math.max(2, 2 * Math.round((length * scale) / 2));
    return element("canvas", { width: even(width), height: even(height) });
  }

  #look() {
    if (this.#grow()) this.#prepare(this.video);
  }

  /** Add a frame. Returns whether it completed a pair. */
  #grow() {
    const { canvas, screen, video } = this;
    const scale = Math.min(canvas.width / screen.videoWidth, canvas.height / screen.videoHeight);
    const [width, height] = [scale * screen.videoWidth, scale * screen.videoHeight];
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(screen, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
    const frame = canvas.toDataURL("image/jpeg", QUALITY);
    byId("screen-now").src = frame;
    if (!this.single) {
      this.single = frame;
      return false;
    }
    video.frames.push(this.single, frame);
    this.single = null;
    while (video.frames.length > this.most) video.frames.splice(0, 2);
    return true;
  }

  /** Have the server encode the frames so far, and show which were new. One request at a time. */
  async #prepare(video) {
    if (this.sending || this.on.busy()) return;
    this.sending = true;
    try {
      const turns = this.on.turns();
      const at = turns.findIndex(({ images }) => images.includes(video));
      const asked = { role: "user", text: "", images: [video] };
      const messages = await messagesOf(at < 0 ? [asked] : turns.slice(0, at + 1), this.on.system());
      const stream = { stream: true, max_tokens: 0, saccade: { trace: true } };
      for await (const { saccade } of chat({ ...this.on.body(), ...stream, messages }))
        if (saccade && video === this.video) this.#tell(saccade);
    } catch (error) {
      if (video === this.video) this.#shorten(error);
    } finally {
      this.sending = false;
    }
  }

  #tell({ videos = [], ms }) {
    const found = videos.at(-1)?.found ?? {};
    byId("screen-words").textContent = `${momentsOf(found)}; encoded in ${milliseconds(ms.total)}`;
  }

  /** Too much for the model: half of it is kept from now on. Else it is over, unless the server is
   * away for a moment. */
  #shorten(error) {
    if (!(error instanceof Refused)) return;
    const { frames } = this.video;
    if (error.param === "messages" && frames.length > 2) {
      this.most = Math.max(2, 2 * Math.floor(frames.length / 4));
      frames.splice(0, frames.length - this.most);
    } else {
      this.stop();
      this.on.failed(error);
    }
  }
}
