"""The cache pool of real member processes, as the cache room's own tests have it."""

from cache.conftest import folder, pool  # noqa: F401  # fixtures
