"""The coordinator's process: connections of workers and gateways around the pure `router`.

It owns admission, placement and the ledger of all models. Knows neither HTTP nor text nor tensors.
"""
