from cli.conftest import models, tripool

__all__ = ["models", "tripool"]
