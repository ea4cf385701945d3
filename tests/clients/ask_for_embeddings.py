"""Embeddings from OpenAI's and Cohere's clients, from litellm, and from the classes of LangChain and LlamaIndex."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm asks the internet for prices

import cohere
import litellm
import openai
from langchain_ollama import OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding


def main() -> None:
    url, key, model, texts = json.loads(sys.stdin.read())
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    strict = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, _strict_response_validation=True)
    made = strict.embeddings.create(model=model, input=texts, encoding_format="float")
    langchain = OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key=key, check_embedding_ctx_length=False)
    headers = {"x-api-key": key}
    langchain_ollama = OllamaEmbeddings(model=model, base_url=url, client_kwargs={"headers": headers})
    lite = litellm.embedding(f"openai/{model}", texts, api_base=f"{url}/v1", api_key=key, encoding_format="float")
    llama_index = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key=key)
    co = cohere.ClientV2(api_key=key, base_url=url)
    embedded = co.embed(model=model, texts=texts, input_type="search_document", embedding_types=["float"])
    ranked = co.rerank(model=model, query=texts[0], documents=texts[1:], top_n=2)
    try:
        client.embeddings.create(model="no", input="a")
        error = "none"
    except openai.NotFoundError as refused:
        error = type(refused).__name__
    answers = {
        "openai": [item.embedding for item in made.data],
        "openai, base64": [item.embedding for item in client.embeddings.create(model=model, input=texts).data],
        "openai, dimensions": [
            item.embedding for item in client.embeddings.create(model=model, input=texts, dimensions=8).data
        ],
        "usage": made.usage.prompt_tokens,
        "langchain": langchain.embed_documents(texts),
        "langchain, query": langchain.embed_query(texts[0]),
        "langchain, ollama": langchain_ollama.embed_documents(texts),
        "litellm": [item["embedding"] for item in lite.data],
        "llama-index": llama_index.get_text_embedding_batch(texts),
        "cohere": embedded.embeddings.float_,
        "cohere, rerank": [[result.index, result.relevance_score] for result in ranked.results],
        "error": error,
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
