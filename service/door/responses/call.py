"""A call of the Responses API, whose previous response may be at another door."""

from dataclasses import dataclass

from deltafront.service.door.edges.call import EdgeCall
from deltafront.service.door.edges.edge import Asked
from deltafront.service.door.responses.answers import ResponsesEdge
from deltafront.service.door.responses.store import Elsewhere, UnknownResponse, nowhere_else


@dataclass(frozen=True)
class ResponsesCall(EdgeCall):
    edge: ResponsesEdge
    elsewhere: Elsewhere = nowhere_else

    async def _read(self, body: bytes, owner: str) -> Asked:
        try:
            return await super()._read(body, owner)
        except UnknownResponse as missing:
            found = await self.elsewhere(missing.response_id, owner, False)
            if found is None:
                raise
        work, model = self.requests.text_budget.work, self.requests.model
        return await work(len(body), lambda _: self.edge.read(body, model, owner, found))
