// Small builders for elements. Text is always set as text: nothing from a model becomes markup.

/** An element with attributes (class, data-label, ...) and children (elements or text). */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** An element only if something changed, so that selections and screen readers are left alone. */
export function replaceIfNew(parent, key, build) {
  if (parent.dataset.key === key) return;
  parent.dataset.key = key;
  parent.replaceChildren(...build());
}

/** A bar from 0 to 1; its number stands beside it in the table. */
export function bar(share) {
  const made = element("span", { class: "bar", "aria-hidden": "true" });
  made.style.width = `${Math.max(0, Math.min(1, share ?? 0)) * 100}%`;
  return made;
}

/**
 * Fill a table. columns: {title, text?, meter?, wide?, of(row)} where `of` gives text or an element.
 * The first column heads its row.
 */
export function fill(table, columns, rows, empty) {
  const key = JSON.stringify(rows);
  replaceIfNew(table, key, () => {
    const head = element(
      "tr",
      { role: "row" },
      ...columns.map((c) =>
        element(
          "th",
          { scope: "col", role: "columnheader", class: c.text ? "text" : "" },
          c.meter ? element("span", { class: "unseen" }, c.title) : c.title,
        ),
      ),
    );
    const body = rows.map((row) =>
      element(
        "tr",
        { role: "row" },
        ...columns.map((column, i) => {
          const value = column.of(row);
          if (i === 0) return element("th", { scope: "row", role: "rowheader", class: "text" }, value);
          const kind = column.meter ? "meter wide" : column.text ? "text wide" : "";
          const label = column.meter ? {} : { "data-label": column.title };
          return element("td", { role: "cell", class: kind, ...label }, value);
        }),
      ),
    );
    if (!rows.length) {
      const cell = element("td", { class: "empty", role: "cell", colspan: columns.length }, empty);
      body.push(element("tr", { role: "row" }, cell));
    }
    return [
      element("thead", { role: "rowgroup" }, head),
      element("tbody", { role: "rowgroup" }, ...body),
    ];
  });
}
