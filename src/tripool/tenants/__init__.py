"""Who may use this server, how much of it, and what they have used. Pure names only.

What touches the world is imported by its module: `tenants.book` (the file), `tenants.watch` (reads it again when it
changes), `tenants.meter` (writes down what was used).
"""

from tripool.tenants.roll import NOBODY, Caller, Key, Roll
from tripool.tenants.tenant import ANONYMOUS, Limits, Tenant

__all__ = ["ANONYMOUS", "NOBODY", "Caller", "Key", "Limits", "Roll", "Tenant"]
