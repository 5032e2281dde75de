"""What tests do with the dashboard, as somebody would who looks at it."""

from playwright.sync_api import expect

#: What the focused element is called, as far as this page names things.
NAME = "each => (each.labels?.[0] ?? each).textContent.trim()"


def live(page):
    expect(page.locator("#connection")).to_have_text("Live")
    return page


def tile(page, name):
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator(".value")


def search(page, **fields):
    for name, text in fields.items():
        page.locator(f"#search [name={name}]").fill(text)
    page.get_by_role("button", name="Search").click()


def show(page, identity):
    page.get_by_label("Id", exact=True).fill(str(identity))
    page.get_by_role("button", name="Look up").click()
    return page.get_by_role("dialog", name="Message")


def answer(page, text):
    """Answer the question that the page asks before it does anything."""
    page.locator("#question").get_by_role("button", name=text).click()


def local(page, ms):
    """An instant as a field of local time has it."""
    return page.evaluate("ms => import('/dashboard/format.js').then(f => f.asLocal(ms))", ms)
