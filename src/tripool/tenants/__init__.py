"""Who may use this server, how much of it, and what they have used. Pure names only.

Modules that do I/O are imported by name: `tenants.key_store` (the file), `tenants.key_watcher` (reads it again when it
changes), `tenants.usage_log` (records usage).
"""

from tripool.tenants.key_table import ANONYMOUS, NOBODY, Caller, Key, KeyTable, Limits, Tenant

__all__ = ["ANONYMOUS", "NOBODY", "Caller", "Key", "Limits", "KeyTable", "Tenant"]
