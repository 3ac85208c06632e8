#include "report/svg.h"

#include "report/text.h"

namespace lockstep {
namespace {

constexpr double kCharacterWidth = 7.0;  // at 11 px in a wide font

/// Counts the bytes that begin a UTF-8 character.
bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }

std::string attribute(const char* name, double value) { return std::string(" ") + name + "=\"" + px(value) + "\""; }

}  // namespace

Svg::Svg(const DrawingSize& size, std::string_view label, std::string_view attributes) {
  out_ = "<svg class=\"" + std::string(size.layout) + "\" viewBox=\"0 0 " + px(size.width) + " " + px(size.height) +
         "\" role=\"img\" aria-label=\"" + html(label) + "\"";
  if (!attributes.empty()) out_.append(" ").append(attributes);
  out_ += ">";
}

void Svg::line(std::string_view css, double x1, double y1, double x2, double y2) {
  out_ += "<line class=\"" + std::string(css) + "\"" + attribute("x1", x1) + attribute("y1", y1) + attribute("x2", x2) +
          attribute("y2", y2) + "/>";
}

void Svg::rect(std::string_view css, double x, double y, double width, double height, std::string_view tooltip) {
  out_ += "<rect class=\"" + std::string(css) + "\"" + attribute("x", x) + attribute("y", y) +
          attribute("width", width > 0 ? width : 0) + attribute("height", height);
  out_ += tooltip.empty() ? "/>" : "><title>" + html(tooltip) + "</title></rect>";
}

void Svg::circle(std::string_view css, double x, double y, double radius) {
  out_ += "<circle class=\"" + std::string(css) + "\"" + attribute("cx", x) + attribute("cy", y) +
          attribute("r", radius) + "/>";
}

void Svg::text(std::string_view css, double x, double y, std::string_view anchor, std::string_view content) {
  out_ += "<text class=\"" + std::string(css) + "\"" + attribute("x", x) + attribute("y", y) + " text-anchor=\"" +
          std::string(anchor) + "\">" + html(content) + "</text>";
}

double text_width(std::string_view text) {
  double width = 0;
  for (const char c : text) width += begins_character(c) ? kCharacterWidth : 0;
  return width;
}

std::string fitted(std::string_view text, double width) {
  if (text_width(text) <= width) return std::string(text);
  double used = kCharacterWidth;  // the ellipsis
  size_t end = 0;
  while (end < text.size()) {
    if (begins_character(text[end]) && (used += kCharacterWidth) > width) break;
    ++end;
  }
  return std::string(text.substr(0, end)) + "\xe2\x80\xa6";
}

}  // namespace lockstep
