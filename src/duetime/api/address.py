"""Where the API is found, for those who need no more of it."""

from duetime.config import Settings


def url(settings: Settings) -> str:
    """Its address, without a slash at the end."""
    host = f"[{settings.api_host}]" if ":" in settings.api_host else settings.api_host
    return f"http{'s' if settings.api_tls_key else ''}://{host}:{settings.api_port}"
