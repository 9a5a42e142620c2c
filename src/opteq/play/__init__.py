"""``opteq play``: a local web page on which a trained model can be tried."""

from opteq.play.app import make_app

__all__ = ["make_app"]
