// Uses the first chart as a person would, and keeps what it shows then: three views and the tip at the cursor.
const chart = document.getElementById("chart-0"), box = chart.getBoundingClientRect();
const all = (selector) => [...chart.querySelectorAll(selector)];
const keep = (id, what) => document.body.append(
  Object.assign(document.createElement("pre"), {id, textContent: JSON.stringify(what)}));
const fire = (type, step) => chart.dispatchEvent(new PointerEvent(type, {
  clientX: box.x + 56 + (step - 1) / 199 * (box.width - 78), clientY: box.y + 9, pointerType: "mouse"}));
const keepView = (id) => keep(id, {
  paths: Object.fromEntries(all("path[data-name]").map((path) => [path.dataset.name, path.getAttribute("d")])),
  ticks: [["middle", "x"], ["end", "y"]].map(([anchor, place]) => all(`text[text-anchor=${anchor}]:not(.mark)`).map(
    (text) => [Number(text.textContent), Number(text.getAttribute(place))])),
});
chart.setPointerCapture = () => {};
setTimeout(() => {
  keepView("whole");
  fire("pointermove", 57);
  keep("tip", tip.innerText.split("\n"));
  fire("pointerdown", 101), fire("pointermove", 150), fire("pointerup", 151);
  keepView("zoomed");
  chart.ondblclick();
  document.querySelector("[data-key]").click();
  keepView("hidden");
}, 500);
