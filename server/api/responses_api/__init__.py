"""POST /v1/responses: OpenAI's Responses API, without anything that is kept between requests."""
