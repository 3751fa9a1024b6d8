// OpenAI's Go client: chat, streams, tools, Responses, batches. It prints a row for each case, like rows.py.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

const (
	question = "How is the weather in Rome?"
	answer   = "Sunny in Rome."
	called   = `{"city": "Rome", "days": 3}`
)

var (
	ctx    = context.Background()
	base   = os.Args[1]
	model  = os.Args[2]
	client = openai.NewClient(option.WithBaseURL(base+"/v1/"), option.WithAPIKey("any"), option.WithMaxRetries(0))
	schema = map[string]any{
		"type":                 "object",
		"properties":           map[string]any{"city": map[string]any{"type": "string"}, "days": map[string]any{"type": "integer"}},
		"required":             []string{"city", "days"},
		"additionalProperties": false,
	}
)

func asked() openai.ChatCompletionNewParams {
	message := openai.UserMessage(question)
	return openai.ChatCompletionNewParams{Model: model, Messages: []openai.ChatCompletionMessageParamUnion{message}}
}

func askedWithTools() openai.ChatCompletionNewParams {
	params := asked()
	params.Tools = []openai.ChatCompletionToolUnionParam{
		openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{Name: "weather", Parameters: schema}),
	}
	return params
}

func responseOf(input string) responses.ResponseNewParams {
	return responses.ResponseNewParams{
		Model: model,
		Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(input)},
	}
}

// equal returns an error unless got is wanted, or err.
func equal(err error, got, wanted any) error {
	if err == nil && got != wanted {
		err = fmt.Errorf("%v is not %v", got, wanted)
	}
	return err
}

func models() error {
	page, err := client.Models.List(ctx)
	if err != nil {
		return err
	}
	return equal(nil, page.Data[0].ID, model)
}

func chat() error {
	got, err := client.Chat.Completions.New(ctx, asked())
	if err != nil {
		return err
	}
	return equal(nil, got.Choices[0].Message.Content, answer)
}

// streamed returns the whole answer, and the name of the last tool call that the client saw finish.
func streamed(params openai.ChatCompletionNewParams, given ...option.RequestOption) (openai.ChatCompletionMessage, string, error) {
	stream, whole, tool := client.Chat.Completions.NewStreaming(ctx, params, given...), openai.ChatCompletionAccumulator{}, ""
	for stream.Next() {
		whole.AddChunk(stream.Current())
		if call, finished := whole.JustFinishedToolCall(); finished {
			tool = call.Name
		}
	}
	if stream.Err() != nil || len(whole.Choices) == 0 {
		return openai.ChatCompletionMessage{}, "", errors.Join(stream.Err(), errors.New("the stream has no choice"))
	}
	return whole.Choices[0].Message, tool, nil
}

func chatStream() error {
	message, _, err := streamed(asked())
	return equal(err, message.Content, answer)
}

func chatStreamWithProgress() error {
	progress := option.WithJSONSet("stream_options", map[string]any{"include_progress": true})
	message, _, err := streamed(asked(), progress)
	return equal(err, message.Content, answer)
}

func chatWithTools() error {
	params := askedWithTools()
	first, err := client.Chat.Completions.New(ctx, params)
	if err != nil {
		return err
	}
	message := first.Choices[0].Message
	if len(message.ToolCalls) != 1 {
		return errors.New(first.RawJSON())
	}
	params.Messages = append(params.Messages, message.ToParam(), openai.ToolMessage("sun", message.ToolCalls[0].ID))
	again, err := client.Chat.Completions.New(ctx, params)
	if err != nil {
		return err
	}
	return equal(nil, again.Choices[0].Message.Content, answer)
}

func streamedTools() error {
	message, finished, err := streamed(askedWithTools())
	if err != nil || len(message.ToolCalls) != 1 {
		return errors.Join(err, fmt.Errorf("%d tool calls", len(message.ToolCalls)))
	}
	return errors.Join(equal(nil, message.ToolCalls[0].Function.Arguments, called), equal(nil, finished, "weather"))
}

func jsonSchema() error {
	params := asked()
	form := shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "weather", Schema: schema, Strict: openai.Bool(true)}
	params.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{JSONSchema: form}
	got, err := client.Chat.Completions.New(ctx, params)
	if err != nil {
		return err
	}
	return equal(nil, got.Choices[0].Message.Content, called)
}

func response() error {
	got, err := client.Responses.New(ctx, responseOf(question))
	if err != nil {
		return err
	}
	return equal(nil, got.OutputText(), answer)
}

func streamedResponse() error {
	stream, text, completed := client.Responses.NewStreaming(ctx, responseOf(question)), "", ""
	for stream.Next() {
		switch event := stream.Current(); event.Type {
		case "response.output_text.delta":
			text += event.AsResponseOutputTextDelta().Delta
		case "response.completed":
			completed = event.AsResponseCompleted().Response.OutputText()
		}
	}
	return errors.Join(equal(stream.Err(), text, answer), equal(nil, completed, answer))
}

func responseWithTools() error {
	params := responseOf(question)
	tool := responses.FunctionToolParam{Name: "weather", Parameters: schema, Strict: openai.Bool(true)}
	params.Tools = []responses.ToolUnionParam{{OfFunction: &tool}}
	first, err := client.Responses.New(ctx, params)
	if err != nil {
		return err
	}
	call := first.Output[len(first.Output)-1].CallID
	params.PreviousResponseID = openai.String(first.ID)
	params.Input = responses.ResponseNewParamsInputUnion{OfInputItemList: responses.ResponseInputParam{
		responses.ResponseInputItemParamOfFunctionCallOutput(call, "sun"),
	}}
	got, err := client.Responses.New(ctx, params)
	if err != nil {
		return err
	}
	return equal(nil, got.OutputText(), answer)
}

func unknownModel() error {
	params := asked()
	params.Model = "nobody"
	_, err := client.Chat.Completions.New(ctx, params)
	var refused *openai.Error
	if !errors.As(err, &refused) || !strings.Contains(refused.Message, "nobody") {
		return fmt.Errorf("it was not refused in words: %w", err)
	}
	return equal(nil, refused.StatusCode, 404)
}

func batch() error {
	body, _ := json.Marshal(asked())
	line := fmt.Sprintf(`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": %s}`, body)
	input := openai.File(strings.NewReader(line), "in.jsonl", "application/jsonl")
	file, err := client.Files.New(ctx, openai.FileNewParams{File: input, Purpose: "batch"})
	if err != nil {
		return err
	}
	made, err := client.Batches.New(ctx, openai.BatchNewParams{
		InputFileID: file.ID, Endpoint: "/v1/chat/completions", CompletionWindow: "24h",
	})
	for until := time.Now().Add(time.Minute); err == nil && made.Status != "completed" && time.Now().Before(until); {
		time.Sleep(100 * time.Millisecond)
		made, err = client.Batches.Get(ctx, made.ID)
	}
	if err != nil {
		return err
	}
	return equal(nil, made.RequestCounts.Completed, int64(1))
}

func main() {
	for _, one := range []struct {
		name string
		run  func() error
	}{
		{"models", models}, {"chat", chat}, {"chat_stream", chatStream},
		{"chat_stream_with_progress", chatStreamWithProgress}, {"chat_with_tools", chatWithTools},
		{"streamed_tools", streamedTools}, {"json_schema", jsonSchema}, {"response", response},
		{"streamed_response", streamedResponse}, {"response_with_tools", responseWithTools},
		{"unknown_model", unknownModel}, {"batch", batch},
	} {
		outcome := "works"
		if err := one.run(); err != nil {
			outcome = "fails: " + err.Error()
		}
		row, _ := json.Marshal([]string{one.name, outcome})
		fmt.Println("row: " + string(row))
	}
}
