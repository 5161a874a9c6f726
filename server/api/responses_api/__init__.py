"""POST /v1/responses: OpenAI's Responses API; nothing is kept between requests."""
