"use strict";
// Filters and sorts the cards of [data-list] below a [data-filter], and enlarges images. A page can be read without it.
for (const bar of document.querySelectorAll("[data-filter]")) {
  const lists = [...bar.parentElement.querySelectorAll("[data-list]")];
  const cards = lists.flatMap(list => [...list.children].map((card, place) => ({
    list, card, place, text: card.textContent.toLowerCase(),
    reward: card.dataset.reward, change: card.dataset.change,
  })));
  const [search, low, high, order] = bar.querySelectorAll("input, select");
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
    const kept = cards.filter(fits);
    for (const each of cards) each.card.hidden = !kept.includes(each);
    for (const each of [...cards].sort((a, b) => rank(a) - rank(b) || a.place - b.place)) each.list.append(each.card);
    shown.value = `${kept.length} of ${cards.length} shown`;
  };
  bar.addEventListener("input", update);
  bar.hidden = !cards.length;
  update();
}

const images = [...document.querySelectorAll("main img")];
if (images.length) {
  const dialog = document.createElement("dialog");
  const large = document.createElement("img");
  const caption = document.createElement("p");
  let current;
  dialog.setAttribute("aria-label", "image");
  dialog.append(large, caption);
  document.body.append(dialog);
  const show = image => {
    current = image;
    large.src = image.src;
    large.alt = image.alt;
    large.toggleAttribute("data-small", image.hasAttribute("data-small"));
    caption.textContent = image.title || image.alt;
    if (!dialog.open) dialog.showModal();
  };
  const step = by => {
    const row = current.closest("article") ?? document;
    const others = images.filter(each => row.contains(each) && each.checkVisibility());
    show(others[(others.indexOf(current) + by + others.length) % others.length] ?? current);
  };
  for (const image of images) {
    image.tabIndex = 0;
    image.setAttribute("role", "button");
    image.addEventListener("click", () => show(image));
    image.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(image); }
    });
  }
  dialog.addEventListener("click", event => event.target === large ? step(1) : dialog.close());
  dialog.addEventListener("keydown", event => {
    if (event.key === "ArrowRight") step(1);
    if (event.key === "ArrowLeft") step(-1);
  });
  dialog.addEventListener("close", () => current.focus());
}
