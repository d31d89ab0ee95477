"""All carriers do what the conformance suite asks; one over sockets is in `tests/collectors/test_socket_carrier.py`."""

from swath.runtime.carrier import Carrier
from swath.runtime.local import LocalCarrier
from swath.runtime.processes import ProcessCarrier
from swath.testing import CarrierConformance


class TestLocalCarrier(CarrierConformance):
    def make_carrier(self, workers: int, fields: tuple[str, ...]) -> Carrier:
        return LocalCarrier(workers, fields)


class TestProcessCarrier(CarrierConformance):
    def make_carrier(self, workers: int, fields: tuple[str, ...]) -> Carrier:
        return ProcessCarrier(workers, fields)
