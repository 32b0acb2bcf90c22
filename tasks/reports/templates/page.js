"use strict";
// A page can be read without this script. It shows the values of curves and smooths them, slides over policies and
// iterations, filters and sorts cards, enlarges images, and, where a server watches a run, shows what is new.

const all = (selector, under = document) => [...under.querySelectorAll(selector)];
const make = (tag, attributes = {}, ...content) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...content);
  return element;
};
const inSvg = (svg, tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  svg.append(element);
  return element;
};
const short = value => String(+value.toPrecision(4));

// What the reader chose, which a new version of the page keeps.
const chosen = { prompt: 0, seed: 0 };

// The mean of the values so far, weighted by weight ** age, as TensorBoard computes it.
const smoothed = (values, weight) => {
  let sum = 0, total = 0;
  return values.map(value => (sum = sum * weight + value, total = total * weight + 1, sum / total));
};

function setUpCurves() {
  const values = make("div", { class: "values", role: "status", hidden: "" });
  document.querySelector("main").append(values);
  const curves = all("svg[data-curve]").map(svg => {
    const [across, up, lines] = JSON.parse(svg.dataset.curve);
    const place = ([low, start, high, end], value) => start + (value - low) / (high - low) * (end - start);
    const paths = all(".line", svg).map((path, index) => ({ path, xs: lines[index][2], ys: lines[index][3] }));
    const xs = [...new Set(lines.flatMap(line => line[2]))].sort((a, b) => a - b);
    const cross = inSvg(svg, "line", { class: "cross", y1: up[1], y2: up[3], visibility: "hidden" });
    const version = inSvg(svg, "line", { class: "cross version", y1: up[1], y2: up[3], visibility: "hidden" });
    const move = (line, x) => {
      const inside = x !== null && x >= across[0] && x <= across[2];
      line.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) for (const end of ["x1", "x2"]) line.setAttribute(end, place(across, x));
    };
    const nearest = event => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const value = across[0] + (at - across[1]) / (across[3] - across[1]) * (across[2] - across[0]);
      return xs.reduce((best, x) => Math.abs(x - value) < Math.abs(best - value) ? x : best);
    };
    return {
      svg, xs, lines, paths, nearest,
      cross: x => move(cross, x),
      mark: x => move(version, x),
      left: x => place(across, x) / svg.viewBox.baseVal.width,
      smooth(weight) {
        for (const each of paths) {
          each.smooth ??= svg.insertBefore(each.path.cloneNode(), cross);
          each.ys = weight ? smoothed(lines[paths.indexOf(each)][3], weight) : lines[paths.indexOf(each)][3];
          each.path.classList.toggle("raw", weight > 0);
          each.smooth.setAttribute("visibility", weight > 0 ? "visible" : "hidden");
          each.smooth.setAttribute("d", "M" + each.xs.map((x, index) =>
            `${place(across, x).toFixed(1)} ${place(up, each.ys[index]).toFixed(1)}`).join("L"));
        }
      },
    };
  });
  let weight = 0, at = null;
  const show = (curve, x) => {
    at = x;
    for (const each of curves) each.cross(x);
    values.hidden = x === null;
    if (x === null) return;
    const rows = curve.lines.flatMap(([name, colour, xs, ys, bands], index) => {
      const place = xs.findLastIndex(each => each <= x);
      if (place < 0) return [];
      const ranges = bands.map(([low, high]) => `${short(low[place])} to ${short(high[place])}`);
      const notes = [
        ...(weight ? [`smoothed ${short(curve.paths[index].ys[place])}`] : []), ...ranges.reverse(),
        ...(xs[place] === x ? [] : [`of ${xs[place]}`]),
      ];
      return make("div", {}, make("i", { class: `s${colour}` }, "●"), ` ${name} `, make("b", {}, short(ys[place])),
        notes.length ? make("small", {}, ` (${notes.join("; ")})`) : "");
    });
    values.replaceChildren(make("div", { class: "soft" }, `iteration ${x}`), ...rows);
    const box = curve.svg.getBoundingClientRect();
    const left = box.left + curve.left(x) * box.width;
    const right = left + 14 + values.offsetWidth < innerWidth;
    values.style.left = `${Math.max(4, right ? left + 10 : left - 10 - values.offsetWidth)}px`;
    values.style.top = `${Math.max(4, Math.min(box.top + 8, innerHeight - values.offsetHeight - 4))}px`;
  };
  for (const curve of curves) {
    curve.svg.tabIndex = 0;
    curve.svg.addEventListener("pointermove", event => show(curve, curve.nearest(event)));
    curve.svg.addEventListener("pointerdown", event => show(curve, curve.nearest(event)));
    for (const gone of ["pointerleave", "blur"]) curve.svg.addEventListener(gone, () => show(curve, null));
    curve.svg.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") show(curve, null);
      if (!step) return;
      event.preventDefault();
      const next = at === null ? (step > 0 ? 0 : curve.xs.length - 1) : curve.xs.indexOf(at) + step;
      show(curve, curve.xs[Math.max(0, Math.min(curve.xs.length - 1, next))]);
    });
  }
  for (const control of all("[data-smoothing]")) {
    const [input, output] = [control.querySelector("input"), control.querySelector("output")];
    control.hidden = !curves.some(curve => curve.xs.length > 2);
    input.addEventListener("input", () => {
      weight = +input.value;
      output.value = weight ? weight.toFixed(2) : "off";
      for (const curve of curves) curve.smooth(weight);
    });
  }
  return curves;
}

// One held-out prompt at every policy, from the images or texts of its card; the curve shows which policy it is.
function setUpPlayer(curves) {
  const card = document.querySelector("[data-player]");
  const prompts = all("[data-heldout]").map(article => ({
    title: article.querySelector(".prompt"),
    given: all("[data-given]", article),
    seeds: all("[data-seed]", article).map(row => all("[data-frame]", row)),
  })).filter(prompt => prompt.seeds.length);
  if (!card || !prompts.length) return;
  const part = name => card.querySelector(`[data-part=${name}]`);
  const [slider, play, stage, siblings] = ["slider", "play", "stage", "siblings"].map(part);
  const hero = curves.filter(curve => curve.svg.closest("[data-hero]"));
  const content = frame => {
    const found = frame.querySelector("img, .absent") ?? frame.querySelector(".excerpt");
    return found ? found.cloneNode(true) : make("div", { class: "absent" }, "nothing to show");
  };
  const frames = () => {
    const { seeds } = prompts[chosen.prompt];
    return seeds[Math.min(chosen.seed, seeds.length - 1)];
  };
  const isText = card.classList.contains("text");
  const rewardOf = frame => parseFloat(frame?.dataset.reward);
  const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
  // Texts of all seeds fit next to each other, so theirs is the mean.
  const rewardAt = place => isText ? mean(prompts[chosen.prompt].seeds.map(row => rewardOf(row[place]))) : rewardOf(frames()[place]);
  const answers = () => prompts[chosen.prompt].seeds.map(row => row[slider.value]).filter(Boolean).map(frame =>
    make("div", { class: "answer" }, make("span", { class: "num" }, Number.isNaN(rewardOf(frame)) ? "none" : rewardOf(frame).toFixed(3)), content(frame)));
  const seedButtons = () => prompts[chosen.prompt].seeds.map((row, seed) => {
    const key = `seed ${seed + 1}`;
    const button = make("button", { "aria-label": key, "aria-pressed": seed === chosen.seed, "data-key": key });
    button.append(row[slider.value]?.querySelector("img")?.cloneNode() ?? key);
    button.addEventListener("click", () => { chosen.seed = seed; show(); card.querySelector(`[data-key="${key}"]`).focus(); });
    return button;
  });
  const show = () => {
    const { title, given, seeds } = prompts[chosen.prompt];
    const frame = frames()[slider.value];
    const version = frame.dataset.frame;
    const [reward, change] = [rewardAt(slider.value), rewardAt(slider.value) - rewardAt(0)];
    const rise = make("span", { class: change > 0 ? "up" : "down" }, `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(3)}`);
    part("prompt").replaceChildren(title.cloneNode(true));
    part("place").value = `${chosen.prompt + 1} of ${prompts.length}`;
    part("version").replaceChildren(make("b", {}, `policy ${version}`), ` reward ${Number.isNaN(reward) ? "none" : reward.toFixed(3)} `,
      ...(+slider.value && change ? [rise] : []));
    slider.setAttribute("aria-valuetext", `policy ${version}`);
    const image = () => make("figure", {}, content(frame), make("figcaption", {}, `policy ${version}`));
    stage.replaceChildren(...given.map(each => each.cloneNode(true)), isText ? make("div", { class: "answers" }, ...answers()) : image());
    siblings.replaceChildren(...(isText || seeds.length < 2 ? [] : seedButtons()));
    for (const curve of hero) curve.mark(+version);
  };
  const turn = by => {
    const version = frames()[slider.value].dataset.frame;
    chosen.prompt = (chosen.prompt + by + prompts.length) % prompts.length;
    fit(version);
  };
  const fit = version => {
    const place = frames().findLastIndex(frame => +frame.dataset.frame <= +version);
    slider.max = frames().length - 1;
    slider.value = place;
    show();
  };
  let timer;
  const stop = () => { clearInterval(timer); timer = undefined; play.textContent = "▶"; play.setAttribute("aria-label", "play"); };
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (slider.value === slider.max) slider.value = 0;
    show();
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "pause");
    timer = setInterval(() => {
      if (!play.isConnected || slider.value === slider.max) return stop();
      slider.value = +slider.value + 1;
      show();
    }, 700);
  });
  slider.addEventListener("input", show);
  part("previous").addEventListener("click", () => turn(-1));
  part("next").addEventListener("click", () => turn(1));
  for (const curve of hero) curve.svg.addEventListener("click", event => fit(curve.nearest(event)));
  chosen.prompt = Math.min(chosen.prompt, prompts.length - 1);
  card.hidden = false;
  card.closest("[data-hero]").classList.add("two");
  fit(Infinity);
}

// One iteration at a time, in place of a list of all.
function setUpIterations() {
  for (const card of all("[data-iterations]")) {
    const details = all("details", card);
    const [row, slider, output] = ["label", "input", "output"].map(name => card.querySelector(name));
    if (!details.length) continue;
    const show = () => {
      for (const [place, each] of details.entries()) each.open = !(each.hidden = place !== +slider.value);
      output.value = details[slider.value].dataset.iteration;
      slider.setAttribute("aria-valuetext", `iteration ${output.value}`);
    };
    slider.max = details.length - 1;
    slider.value = slider.max;
    slider.addEventListener("input", show);
    row.hidden = details.length < 2;
    show();
  }
}

function setUpFilters() {
  for (const bar of all("[data-filter]")) {
    const lists = all("[data-list]", bar.parentElement);
    const cards = lists.flatMap(list => [...list.children].map((card, place) => ({
      list, card, place, text: card.textContent.toLowerCase(),
      reward: card.dataset.reward, change: card.dataset.change,
    })));
    const [search, low, high, order] = all("input, select", bar);
    const shown = bar.querySelector("output");
    const fits = card => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (!words.every(word => card.text.includes(word))) return false;
      if (!low.value && !high.value) return true;
      const reward = parseFloat(card.reward);
      return reward >= (low.value ? +low.value : -Infinity) && reward <= (high.value ? +high.value : Infinity);
    };
    const rank = card => {
      const [field, sign] = order.value.split(" ");
      if (!field) return card.place;
      const value = parseFloat(card[field]);
      return Number.isNaN(value) ? Infinity : value * +sign;
    };
    const update = () => {
      const kept = new Set(cards.filter(fits));
      for (const each of cards) each.card.hidden = !kept.has(each);
      for (const each of [...cards].sort((a, b) => rank(a) - rank(b) || a.place - b.place)) each.list.append(each.card);
      shown.value = `${kept.size} of ${cards.length} shown`;
    };
    bar.addEventListener("input", update);
    bar.hidden = !cards.length;
    update();
  }
}

// Images, also those that are put in place later, enlarge on a click.
const dialog = make("dialog", { "aria-label": "image" }, make("img"), make("p"));
function setUpImages() {
  document.body.append(dialog);
  const [large, caption] = dialog.children;
  let current;
  const show = image => {
    current = image;
    large.src = image.src;
    large.alt = image.alt;
    large.toggleAttribute("data-small", image.hasAttribute("data-small"));
    caption.textContent = image.title || image.alt;
    if (!dialog.open) dialog.showModal();
  };
  const step = by => {
    const others = all("img", current.closest("article, details, [data-player]") ?? document.querySelector("main"))
      .filter(each => each.checkVisibility());
    show(others[(others.indexOf(current) + by + others.length) % others.length] ?? current);
  };
  const target = event => event.target.closest?.("main img:not(button img)");
  const mark = () => {
    for (const image of all("main img:not(button img):not([role])")) {
      image.tabIndex = 0;
      image.setAttribute("role", "button");
    }
  };
  new MutationObserver(mark).observe(document.body, { childList: true, subtree: true });
  mark();
  document.addEventListener("click", event => { if (target(event)) show(target(event)); });
  document.addEventListener("keydown", event => {
    if (target(event) && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); show(target(event)); }
  });
  dialog.addEventListener("click", event => event.target === large ? step(1) : dialog.close());
  dialog.addEventListener("keydown", event => {
    if (event.key === "ArrowRight") step(1);
    if (event.key === "ArrowLeft") step(-1);
  });
  dialog.addEventListener("close", () => current.focus());
}

// Asks the server of `grpo inspect --watch` whether the run has something new, and takes it over.
function setUpWatch() {
  const status = text => { for (const each of all("[data-status]")) each.textContent = text; };
  const busy = () => dialog.open || document.hidden || document.querySelector("main :active, main select:focus");
  const key = element => element.dataset.key ?? element.querySelector("summary")?.textContent.trim();
  const controls = () => all("input[data-key], select[data-key]");
  const takeOver = page => {
    const before = new Map(controls().map(each => [each.dataset.key, [each.value, each.type === "range" && each.value === each.max]]));
    const open = new Set(all("details[open]").map(key));
    const focused = document.activeElement?.dataset?.key;
    for (const part of ["header", "main"]) document.querySelector(part).replaceWith(page.querySelector(part));
    document.body.dataset.watch = page.body.dataset.watch;
    for (const each of all("details")) each.open ||= open.has(key(each));
    start();
    for (const each of controls()) {
      const [value, atEnd] = before.get(each.dataset.key) ?? [];
      if (value === undefined || atEnd && each.dataset.key !== "smoothing") continue;
      each.value = value;
      each.dispatchEvent(new Event("input", { bubbles: true }));
    }
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  };
  const read = async (address, content) => {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw Error(await answer.text());
    return content(answer);
  };
  let failures = 0;
  // One that passes, as when a file is replaced while it is read, is left to the status.
  const report = why => {
    failures = why ? failures + 1 : 0;
    document.querySelector("[data-failure]")?.remove();
    if (failures < 3) return;
    const box = Object.assign(document.createElement("section"), { className: "warning", role: "alert" });
    box.dataset.failure = "";
    box.textContent = `This page cannot be read again, and shows what was read last. ${why}`;
    document.querySelector("main").prepend(box);
  };
  const look = async () => {
    try {
      let state = await read("state" + location.search, answer => answer.json());
      if (state.tag !== document.body.dataset.watch && !busy()) {
        takeOver(new DOMParser().parseFromString(await read(location.href, answer => answer.text()), "text/html"));
        state = await read("state" + location.search, answer => answer.json());
      }
      status(state.status);
      report("");
    } catch (error) {
      const why = error instanceof TypeError ? "the server of this page has ended" : error.message;
      status(`${why}; this is what was read last`);
      report(why);
    }
    setTimeout(look, 2000 * 2 ** Math.min(failures, 5));
  };
  look();
}

function start() {
  setUpPlayer(setUpCurves());
  setUpIterations();
  setUpFilters();
}

start();
setUpImages();
if (document.body.dataset.watch) setUpWatch();
