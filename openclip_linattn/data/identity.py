"""What tells whether a shard is still the one that was read before."""

from __future__ import annotations

from openclip_linattn.data.reading import REMOTE, local_path, scheme_of


def identity(url: str) -> str | None:
    """A local shard's size and time of change in ns ("10240-1719412345678901234"), a remote one's ETag or the like.

    None for the output of a command, and for a shard that cannot be looked up now.
    """
    scheme = scheme_of(url)
    if scheme in REMOTE:
        from openclip_linattn.data.remote import remote_version

        return remote_version(url)
    if scheme != "local":
        return None
    try:
        status = local_path(url).stat()
    except OSError:
        return None
    return f"{status.st_size}-{status.st_mtime_ns}"
