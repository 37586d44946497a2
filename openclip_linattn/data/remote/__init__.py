"""Shards in object stores and on web servers, read to their end however often the connection drops."""

from openclip_linattn.data.remote.opening import open_remote, remote_version
from openclip_linattn.data.remote.readers import register_readers

__all__ = ["open_remote", "register_readers", "remote_version"]
