// What keeps somebody from using the page: a list of sentences, empty where all is well.
() => {
  const wrong = [];
  const seen = (each) => each.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  // What is in a region or an image is not its name.
  const within = (each) => (each.matches("[role=region], [role=img]") ? "" : each.textContent);
  const called = (each) =>
    (each.getAttribute("aria-label") ?? each.labels?.[0]?.textContent ?? within(each)).trim();
  const where = (each) => `${each.tagName.toLowerCase()}${each.id ? `#${each.id}` : ""}.${each.getAttribute("class") ?? ""}`;

  for (const each of document.querySelectorAll("button, a, input, summary, [role=region], [role=img]")) {
    if (seen(each) && !called(each)) wrong.push(`${where(each)} has no name`);
  }
  for (const each of document.querySelectorAll("section, dialog")) {
    const title = document.getElementById(each.getAttribute("aria-labelledby"));
    if (!title) wrong.push(`${where(each)} has no title`);
  }
  for (const form of document.querySelectorAll("form")) {
    const boxes = [...form.querySelectorAll("input, button")].filter(seen).map((each) => [each, each.getBoundingClientRect()]);
    boxes.forEach(([one, a], index) => {
      for (const [other, b] of boxes.slice(index + 1)) {
        const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
        if (!apart) wrong.push(`${where(one)} ${one.name} lies over ${where(other)} ${other.name}`);
      }
    });
  }
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  if (new Set(ids).size !== ids.length) wrong.push("two elements have one id");
  if (document.querySelectorAll("h1").length !== 1) wrong.push("there is not one h1");
  if (!document.documentElement.lang) wrong.push("the language is not said");
  if (document.documentElement.scrollWidth > innerWidth) wrong.push(`wider than the window: ${document.documentElement.scrollWidth}`);

  const painter = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    painter.clearRect(0, 0, 1, 1);
    painter.fillStyle = colour;
    painter.fillRect(0, 0, 1, 1);
    return [...painter.getImageData(0, 0, 1, 1).data];
  };
  const light = ([red, green, blue]) => {
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
  };
  const ground = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return rgba("Canvas");
  };
  const check = (each, colour, least) => {
    const [more, less] = [light(rgba(colour)), light(ground(each))].sort((a, b) => b - a);
    const contrast = (more + 0.05) / (less + 0.05);
    if (contrast < least) wrong.push(`${where(each)}: contrast ${contrast.toFixed(2)}`);
  };
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (own && seen(each)) check(each, getComputedStyle(each)[each.closest("svg") ? "fill" : "color"], 4.5);
  }
  for (const each of document.querySelectorAll(".exact, .spread")) check(each.parentElement, getComputedStyle(each).backgroundColor, 3);
  for (const each of document.querySelectorAll("polyline")) check(each, getComputedStyle(each).stroke, 3);
  return wrong;
}
